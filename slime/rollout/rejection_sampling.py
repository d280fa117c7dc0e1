"""Rejection sampling: answers are generated, scored and filtered, and the accepted ones written to files.

``--rollout-function-path slime.rollout.rejection_sampling.generate_rollout --rejection-output DIR`` with
``--debug-rollout-only``. A rollout is ``--rollout-batch-size`` prompts and one file; the data state is saved
after it. So a run that was killed goes on with the rollout that it was in, whose file is then written anew:
no prompt is left out, and no answer is written twice.
"""

import os
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet

from slime.config.generation import GenerationConfig
from slime.config.rejection import RejectionConfig
from slime.config.run import filled
from slime.rollout.attempts import flatten
from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput, blame
from slime.rollout.evaluation import eval_rollout
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, MetricGatherer, filtered
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate_and_rm_group, is_given_up
from slime.rollout.ledger import ABORTED, RolloutAccount
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.async_utils import gather_or_cancel, run
from slime.utils.misc import load_function
from slime.utils.types import Sample

Row = dict[str, Any]
REJECTED = "rejected"


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """All groups of the rollout's prompts; what was accepted of them is in the rollout's file."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))
    return run(sample_by_rejection(args, rollout_id, data_source))


async def sample_by_rejection(args: Any, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """Take prompts, answer all of them, and write the answers that pass.

    Raises:
        RolloutError: user code failed, or nothing was left of any prompt.
    """
    state, config = GenerateState(args), filled(GenerationConfig, args)
    state.reset()
    set_current_rollout_id(rollout_id)
    account = RolloutAccount(data_source)
    taken = account.take(config.batches.rollout_batch_size)
    for group in taken:
        _encode_conversations(config, state, group)
    groups = await gather_or_cancel(
        generate_and_rm_group(args, group, state.sampling_params) for group in taken
    )
    gatherer, rows, whole = MetricGatherer(), [], []
    for leased, group in zip(taken, groups, strict=True):
        if is_given_up(group):
            account.drop(leased, ABORTED)
            continue
        whole.append(group)
        verdict = _judge(config, group)
        accepted = accept(config, group) if verdict.keep else []
        if not verdict.keep:
            gatherer.on_dynamic_filter_drop(verdict.reason)
            account.filter(leased)
        elif accepted:
            account.train(leased)
        else:
            account.drop(leased, REJECTED)
        rows += [to_row(state, sample) for sample in accepted]
    if not whole:
        raise RolloutError(f"rollout {rollout_id}: none of {len(taken)} prompts was answered")
    write_rows(config.rejection, rollout_id, rows)
    count = sum(len(flatten(group)) for group in whole)
    metrics = {"rejection/accepted": len(rows), "rejection/acceptance_rate": len(rows) / count}
    metrics |= gatherer.collect() | account.metrics()
    account.close()
    return RolloutFnTrainOutput(samples=whole, metrics=metrics)


def accept(config: GenerationConfig, group: list[Any]) -> list[Sample]:
    """The samples that are good enough, at most ``--rejection-max-per-prompt``, in their order.

    Of equal rewards the first ones are taken. ``--rollout-sample-filter-path`` may have marked some to leave
    out.
    """
    chosen = config.rejection
    passed = [
        (float(sample.get_reward_value(config.rewards)), position, sample)
        for position, sample in enumerate(flatten(group))
        if not sample.remove_sample and sample.get_reward_value(config.rewards) >= chosen.rejection_min_reward
    ]
    best = sorted(passed, key=lambda entry: (-entry[0], entry[1]))[: chosen.rejection_max_per_prompt]
    return [sample for _, _, sample in sorted(best, key=lambda entry: entry[1])]


def to_row(state: GenerateState, sample: Sample) -> Row:
    """A record: ``messages`` to imitate where the prompt is a conversation that the model answered in one
    turn.

    Otherwise ``prompt`` and ``response`` as text; tools have spoken in between, or a template was applied
    before.
    """
    row: Row = {
        "response": sample.response,
        "reward": sample.reward,
        "label": sample.label,
        "status": sample.status.value,
        "index": sample.index,
        "group_index": sample.group_index,
        "metadata": sample.metadata,
    }
    if isinstance(sample.prompt, str):
        return {"prompt": sample.prompt} | row
    if 0 in (sample.loss_mask or []):
        return {"prompt": state.tokenizer.decode(sample.tokens[: -sample.response_length])} | row
    return {"messages": [*sample.prompt, {"role": "assistant", "content": _content(state, sample)}]} | row


def _content(state: GenerateState, sample: Sample) -> str:
    """The response without the token that ended it, which the chat template adds by itself."""
    ids = sample.tokens[len(sample.tokens) - sample.response_length :]
    if ids and ids[-1] == state.tokenizer.eos_token_id:
        ids = ids[:-1]
    return state.tokenizer.decode(ids)


def write_rows(config: RejectionConfig, rollout_id: int, rows: list[Row]) -> Path:
    """``accepted_<rollout>`` in the output directory: whole, or not there."""
    assert config.rejection_output is not None
    path = Path(config.rejection_output) / f"accepted_{rollout_id:06d}.{config.rejection_format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    if config.rejection_format == "jsonl":
        options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
        partial.write_bytes(b"".join(orjson.dumps(row, option=options) for row in rows))
    else:
        # Metadata may differ from row to row, and a column has one type: as JSON, which data sources read.
        flat = [
            row | {key: orjson.dumps(row[key]).decode() for key in ("metadata", "reward")} for row in rows
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), partial)
    os.replace(partial, path)
    return path


def _encode_conversations(config: GenerationConfig, state: GenerateState, group: list[Sample]) -> None:
    """Conversations stay what they are, so that the answer can be written behind them."""
    for sample in group:
        if isinstance(sample.prompt, list) and not sample.tokens:
            text = state.tokenizer.apply_chat_template(
                sample.prompt,
                tools=sample.metadata.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **config.data.apply_chat_template_kwargs,
            )
            sample.tokens = state.tokenizer(text, add_special_tokens=False)["input_ids"]


def _judge(config: GenerationConfig, group: list[Any]) -> DynamicFilterOutput:
    if config.rollout.rollout_sample_filter_path:
        sample_filter = load_function(config.rollout.rollout_sample_filter_path)
        with blame(sample_filter, flatten(group)):
            sample_filter(config.flat, [group])
    return filtered(config, group)
