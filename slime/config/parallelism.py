"""How the trainer's model is spread over its processes."""

from dataclasses import dataclass

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout of the trainer's processes.

    Attributes:
        virtual_pipeline_model_parallel_size: model chunks of each rank; None for a single one.
    """

    decoder_first_pipeline_num_layers: int | None = flag(above=0, help="layers of the first pipeline stage")
    decoder_last_pipeline_num_layers: int | None = flag(above=0, help="layers of the last pipeline stage")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        above=0, help="layers of a virtual stage; each pipeline rank has several such stages"
    )
    num_virtual_stages_per_pipeline_rank: int = flag(
        1, above=0, help="virtual stages of a pipeline rank, in place of saying how many layers each has"
    )
    context_parallel_size: int = flag(1, above=0, help="ranks that share each sequence")
    allgather_cp: bool = flag(
        False,
        help="context parallelism by one stretch of a packed row, not two chunks of each sequence",
    )
    virtual_pipeline_model_parallel_size: int | None
