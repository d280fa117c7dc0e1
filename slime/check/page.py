"""The page that ``--check`` prints."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple

from slime.check.activations import longest_sample, micro_batches, not_estimated
from slime.check.engines import EngineNeeds
from slime.check.host import sample_bytes
from slime.check.layout import Layout, Stage
from slime.check.needs import RoleNeeds, StageNeeds, reserve
from slime.check.report import GIB, Report
from slime.config.trainers import trainer_of


def page(report: Report) -> str:
    """Parameters, layout, batches, memory, and what does not fit."""
    config = report.config
    whose = f"Policy {config.policies.policy_name}: " if config.policies.policy_name else ""
    lines = [f"{whose}{config.hf_checkpoint.hf_checkpoint}: {config.model.model_type}", ""]
    for role in report.roles:
        lines += _section(f"Parameters of the {role.role}", _parameters(report, role))
        lines += _section(f"Layout of the {role.role}", _layout(report, role))
    lines += _section("Placement", _placement(report))
    lines += _section("Batches", _batches(report))
    for role in report.roles:
        title = f"Memory of a GPU while the {role.role} trains, in GiB of {report.gpu / GIB:.1f}"
        lines += _section(title, _memory(report, role))
    lines += _section("Memory of the fullest node's host, in GiB", _host(report))
    lines += _section("Engines", _engines(report.engines))
    lines += _section("Will not fit", report.misfits)
    return "\n".join(lines)


def totals(reports: Sequence[Report]) -> str:
    """What all policies of a run take together; the pages before it say what each does."""
    models = [sum(role.whole.values()) for report in reports for role in report.roles]
    trainers = sum(_trainer_gpus(report) for report in reports)
    engines = sum(report.config.cluster.rollout_num_gpus for report in reports if report.engines)
    host = sum(role.host_bytes for report in reports for role in report.roles)
    lines = [
        f"parameters that are trained: {_billions(sum(models))} of {len(models)} models",
        f"GPUs in all: {trainers + engines} ({trainers} of trainers, {engines} of engines)",
        f"memory of hosts, of the ranks of all trainers: {host / GIB:.2f} GiB",
    ]
    return "\n".join(_section(f"All {len(reports)} policies", lines))


def _trainer_gpus(report: Report) -> int:
    return report.config.cluster.trainer_world_size if report.roles else 0


def _section(title: str, lines: Sequence[str] | Iterator[str]) -> list[str]:
    found = [f"  {line}" for line in lines]
    return [title, *found, ""] if found else []


def _billions(count: int) -> str:
    if count >= 10**9:
        return f"{count / 10**9:.2f} B"
    return f"{count / 10**6:.2f} M" if count >= 10**6 else str(count)


def _split(parameters: dict[str, int]) -> str:
    return ", ".join(f"{kind} {_billions(count)}" for kind, count in parameters.items() if count)


# Our layer specs give what config.json asks for anyway.
_OWN_LAYERS = ("slime.", "slime_plugins.")


def _parameters(report: Report, role: RoleNeeds) -> Iterator[str]:
    whole = {str(kind): count for kind, count in role.whole.items()}
    yield f"{_billions(sum(whole.values()))} in all ({_split(whole)})"
    config = report.config
    for flag, given in (
        ("--spec", " ".join(config.layer_variants.spec or ())),
        ("--custom-model-provider-path", config.trainer.custom_model_provider_path or ""),
    ):
        if given and not given.startswith(_OWN_LAYERS):
            yield f"{flag} {given}: is not looked into; the layers of a {config.model.model_type} are counted"


def _layout(report: Report, role: RoleNeeds) -> Iterator[str]:
    layout = role.layout
    trainer = trainer_of(report.config.trainer)
    if trainer.splits_weights_evenly:
        yield f"{layout.world} ranks, each with a part of every weight ({trainer.name.upper()})"
        return
    sizes = f"TP {layout.tp} x PP {layout.pp} x CP {layout.cp} x DP {layout.dp}"
    if report.config.model.num_experts:
        sizes += f"; experts EP {layout.ep} x ETP {layout.etp} x DP {layout.edp}"
    chunks = f", {layout.vpp} model chunks of each rank" if layout.vpp > 1 else ""
    yield f"{layout.world} ranks: {sizes}{chunks}"
    for number, stage in enumerate(role.stages):
        ranks = layout.ranks(number)
        counts = {str(kind): count for kind, count in stage.parameters.items()}
        sizes = f"{_billions(sum(counts.values()))} ({_split(counts)})"
        yield f"ranks {ranks[0]}-{ranks[-1]}: {_held(layout, number)}; each {sizes}"


def _held(layout: Layout, number: int) -> str:
    parts = ["embedding"] if number == 0 else []
    parts.append(_layers(layout.stages[number]))
    return ", ".join([*parts, *(["head"] if number == layout.pp - 1 else [])])


def _layers(stage: Stage) -> str:
    spans = [f"{layers[0]}-{layers[-1]}" for layers in stage if layers]
    return f"layers {' and '.join(spans)}" if spans else "no layers"


def _placement(report: Report) -> Iterator[str]:
    config = report.config
    cluster, engines = config.cluster, config.engines
    if report.roles:
        nodes = f"{cluster.actor_num_nodes} x {cluster.actor_num_gpus_per_node}"
        yield f"actor: {cluster.trainer_world_size} GPUs ({nodes})"
    if config.critic.use_critic:
        own = config.critic.critic_num_gpus
        yield f"critic: {own} GPUs of its own" if own else "critic: the actor's GPUs, in turns"
    if engines.rollout_external:
        yield f"engines: {engines.rollout_num_engines} that run elsewhere"
    for model in engines.served_models:
        shared = "shared with the trainer" if cluster.colocate else "of their own"
        yield f"engines of {model.name}: {model.num_engines} on {model.total_num_gpus} GPUs {shared}"
    if cluster.rollout_spare_gpus:
        yield f"for engines that join: {cluster.rollout_spare_gpus} GPUs"
    training = cluster.trainer_world_size + config.critic.critic_num_gpus
    gpus = 0 if config.debug.debug_rollout_only else training
    serving = 0 if engines.rollout_external else cluster.rollout_num_gpus + (cluster.rollout_spare_gpus or 0)
    total = max(gpus, serving) if cluster.colocate else gpus + serving
    yield f"GPUs in all: {total}, {cluster.num_gpus_per_node} of a node"
    if report.gpu_is_assumed:
        yield (
            f"their memory: {report.gpu / GIB:.1f} GiB each, an assumption, as this machine has no GPU "
            "(--check-gpu-memory-gb says another size)"
        )


def _batches(report: Report) -> Iterator[str]:
    config = report.config
    batches = config.batches
    prompts, each = batches.rollout_batch_size, batches.n_samples_per_prompt
    samples, step = prompts * each, batches.global_batch_size
    yield f"rollout: {prompts} prompts x {each} = {samples} samples"
    if not report.roles:
        return
    actor = report.roles[0]
    layout = actor.layout
    mine = step // layout.dp
    yield f"optimizer steps: {samples // step} of {step} samples, {mine} of each data-parallel rank"
    count = micro_batches(batches, layout)
    how = "as many as tokens want" if count is None else f"{count} of {batches.micro_batch_size} samples"
    limit = "no flag limits their tokens" if actor.tokens is None else f"up to {actor.tokens} tokens on a GPU"
    yield f"micro-batches of a step on each rank: {how}, {limit}"
    longest = longest_sample(config.rollout)
    if count is None and longest and actor.tokens and longest > actor.tokens * layout.cp:
        yield (
            f"a sample may have {longest} tokens and be a micro-batch alone: then activations are "
            f"{longest / layout.cp / actor.tokens:.1f} times those below"
        )


_COLUMNS = ("weights", "gradients", "optimizer", "activations", "logits", "reserve", "sum")


def _memory(report: Report, role: RoleNeeds) -> Iterator[str]:
    if all(stage.activations is None for stage in role.stages):
        why = not_estimated(report.config) or "where no flag limits tokens"
        yield f"activations are not estimated {why}"
    yield f"{'ranks':>12}" + "".join(f"{name:>12}" for name in _COLUMNS)
    for number, stage in enumerate(role.stages):
        ranks = role.layout.ranks(number)
        yield f"{f'{ranks[0]}-{ranks[-1]}':>12}" + "".join(_cell(value) for value in _row(report, stage))


def _row(report: Report, stage: StageNeeds) -> list[float]:
    kept = stage.activations
    activations = [0.0, 0.0]
    if kept is not None:
        # Logits are gone when layers are computed again: the worse moment counts.
        head = kept.logits if kept.kept + kept.logits >= kept.recomputing else 0.0
        activations = [kept.peak - head, head]
    states, spare = stage.states, reserve(report.gpu)
    parts = [states.weights, states.gradients, states.optimizer, *activations, spare]
    return [*parts, stage.total + spare]


_HOST_COLUMNS = ("optimizer", "asleep", "versions", "saving", "snapshots", "standbys", "sum")


def _host(report: Report) -> Iterator[str]:
    if report.roles:
        yield f"{'ranks':>20}" + "".join(f"{name:>12}" for name in _HOST_COLUMNS)
    for role in report.roles:
        node = role.node
        ranks = f"{role.role} {node.ranks[0]}-{node.ranks[-1]}"
        sizes = [*astuple(node.needs), node.needs.total]
        yield f"{ranks:>20}" + "".join(_cell(size) for size in sizes)
    longest, size = longest_sample(report.config.rollout), "not counted where no flag limits their length"
    if longest is not None:
        size = f"up to {sample_bytes(report.config, longest) / GIB:.2f}"
    yield f"samples of a rollout, on the node of the rollout manager: {size}"


def _cell(size: float) -> str:
    return f"{size / GIB:>12.2f}"


def _engines(engines: Sequence[EngineNeeds]) -> Iterator[str]:
    for engine in engines:
        yield (
            f"{engine.engines} of {engine.model}, {engine.gpus} GPUs each: of {engine.static / GIB:.2f} GiB "
            f"of a GPU weights take {engine.weights / GIB:.2f}, which leaves the KV cache "
            f"{max(0, engine.cache) / GIB:.2f}: {engine.tokens} tokens of an engine"
        )
