"""What plug-ins read the tensors of a Hugging Face directory with."""

import torch

from slime.models.checkpoint.weights_dir import WeightsReader


class SafetensorReader(WeightsReader):
    """The tensors of a checkpoint directory, dequantised where they are quantised."""

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.read(name)
