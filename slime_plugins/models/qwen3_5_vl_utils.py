"""Positions of packed sequences with images and videos, as Qwen3.5 counts them, and their parts by rank."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch


def build_packed_mrope_position_ids(
    input_ids: torch.Tensor,
    cu_seqlens: Sequence[int] | torch.Tensor,
    image_grid_thw: torch.Tensor | None,
    video_grid_thw: torch.Tensor | None,
    *,
    image_token_id: int,
    video_token_id: int,
    vision_start_token_id: int,
    spatial_merge_size: int,
) -> torch.Tensor:
    """Returns time, height and width of each token within its sequence.

    A text counts on by one in all three. The patches of an image or of a frame behind a ``vision_start`` have
    their row and column, from the position where it begins; what follows goes on behind the longer side.

    Args:
        input_ids: ``[T]`` or ``[1, T]`` of all sequences.
        cu_seqlens: where each sequence begins, and T.
        image_grid_thw: ``[images, 3]``, patches in time, height and width before they are merged.
        video_grid_thw: ``[videos, 3]``; each frame of a video has its own ``vision_start``.
        spatial_merge_size: patches of a side that are one token.

    Returns:
        ``[3, *input_ids.shape]`` int64.

    Raises:
        ValueError: tokens and grids do not belong together.
    """
    ids = input_ids.flatten().tolist()
    grids = {
        image_token_id: _sides(image_grid_thw, spatial_merge_size, frames=False),
        video_token_id: _sides(video_grid_thw, spatial_merge_size, frames=True),
    }
    found = torch.empty(3, len(ids), dtype=torch.int64)
    bounds = [int(bound) for bound in cu_seqlens]
    for begin, end in pairwise(bounds):
        at = position = begin
        while at < end:
            token = ids[at]
            if token not in grids:
                found[:, at] = position - begin
                at, position = at + 1, position + 1
                continue
            time, height, width = next(grids[token], (0, 0, 0))
            after = at + time * height * width
            is_begun = at > begin and ids[at - 1] == vision_start_token_id
            if not is_begun or after == at or after > end or ids[at:after] != [token] * (after - at):
                wanted = f"{time} x {height} x {width} of it behind {vision_start_token_id}"
                raise ValueError(f"token {token} at {at} (wanted: {wanted})")
            found[:, at:after] = _patches(time, height, width) + position - begin
            at, position = after, position + max(height, width)
    if any(next(left, None) for left in grids.values()):
        raise ValueError("there are more images or videos than tokens of them")
    return found.view(3, *input_ids.shape).to(input_ids.device)


def _sides(grid_thw: torch.Tensor | None, merge: int, *, frames: bool) -> Iterator[tuple[int, int, int]]:
    """Yields times, rows and columns of tokens, of frames one by one."""
    for time, height, width in [] if grid_thw is None else grid_thw.tolist():
        rows, columns = height // merge, width // merge
        yield from [(1, rows, columns)] * time if frames else [(time, rows, columns)]


def _patches(time: int, height: int, width: int) -> torch.Tensor:
    sides = torch.arange(time), torch.arange(height), torch.arange(width)
    return torch.stack(torch.meshgrid(*sides, indexing="ij")).view(3, -1)


def get_packed_cp_local_indices(
    cu_seqlens: Sequence[int] | torch.Tensor, cp_size: int, cp_rank: int, device: torch.device
) -> torch.Tensor:
    """Returns where the tokens of a context-parallel rank are in the packed row, int64.

    Each sequence has ``2 * cp_size`` chunks, of which a rank has one from the front and one from the back.

    Raises:
        ValueError: a sequence cannot be cut so.
    """
    bounds = [int(bound) for bound in cu_seqlens]
    parts = []
    for begin, end in pairwise(bounds):
        chunk, rest = divmod(end - begin, 2 * cp_size)
        if rest:
            raise ValueError(f"a sequence of {end - begin} tokens (wanted: a multiple of {2 * cp_size})")
        parts += [
            torch.arange(begin + number * chunk, begin + (number + 1) * chunk, device=device)
            for number in (cp_rank, 2 * cp_size - 1 - cp_rank)
        ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
