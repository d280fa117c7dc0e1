"""The models of a run: what --sglang-config says, what follows, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.arguments import validated_args
from slime.arguments.validate.fleet_checks import bad_models
from slime.arguments.validate.served_models import ModelConfig, ServerGroupConfig, SglangConfig
from tests.run_args import run_args

POLICY = {"name": "policy", "server_groups": [{"worker_type": "regular", "num_gpus": 1}]}
SECRET = "http://user:secret"


def judge(path: Path, **changes: Any) -> dict[str, Any]:
    groups = [{"worker_type": "regular", "num_gpus": 1}]
    return {"name": "judge", "model_path": str(path), "server_groups": groups} | changes


def group(kind: str = "regular", num_gpus: int = 1, **changes: Any) -> dict[str, Any]:
    return {"worker_type": kind, "num_gpus": num_gpus} | changes


@pytest.fixture
def configured(words, tmp_path):
    """``configured([models], flag=...)``: a command line with such a file, on as many GPUs as it takes."""

    def build(models: Any, **changes: Any) -> list[str]:
        path = tmp_path / "fleet.yaml"
        path.write_text(models if isinstance(models, str) else yaml.safe_dump({"sglang": models}))
        return words(**{"colocate": None, "rollout_num_gpus": 2, "sglang_config": path} | changes)

    return build


def test_without_a_file_there_is_one_model_of_equal_engines(words, checkpoint) -> None:
    args = validated_args(words(colocate=None, rollout_num_gpus=3))
    (model,) = args.served_models
    assert (model.name, model.model_path, model.update_weights) == ("default", str(checkpoint), True)
    (only,) = model.server_groups
    assert (only.worker_type, only.num_gpus, only.size, only.num_engines) == ("regular", 3, 1, 3)
    assert args.rollout_num_engines == 3


def test_what_a_file_leaves_open_follows_from_the_flags(configured, checkpoint, altered_checkpoint) -> None:
    other = altered_checkpoint(num_hidden_layers=3)
    policy = {"name": "policy", "engine_groups": [group(), group("placeholder", 2)]}
    models = [policy, judge(other, server_groups=[group(overrides={"context_length": 64})])]
    args = validated_args(configured(models, rollout_num_gpus=4))
    first, second = args.served_models
    assert (first.model_path, first.update_weights, first.num_engines) == (str(checkpoint), True, 1)
    assert (second.model_path, second.update_weights) == (str(other), False)
    assert second.server_groups[0].overrides == {"model_path": str(other), "context_length": 64}
    assert (first.total_num_gpus, second.total_num_gpus, args.rollout_num_engines) == (3, 1, 1)


def test_a_path_may_stand_in_the_overrides_and_updates_may_be_said(configured, altered_checkpoint) -> None:
    path = str(altered_checkpoint())
    entry = {"name": "twin", "update_weights": True, "server_groups": [group(overrides={"model_path": path})]}
    _, twin = validated_args(configured([POLICY, entry])).served_models
    assert (twin.model_path, twin.update_weights) == (path, True)


def test_updates_have_the_format_of_what_the_engines_start_with(configured, altered_checkpoint) -> None:
    path = str(altered_checkpoint(quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}))
    own = POLICY | {"model_path": path, "update_weights": True}
    args = validated_args(configured([own], rollout_num_gpus=1))
    assert args.synced_checkpoint == path != args.hf_checkpoint
    plain = validated_args(configured([POLICY], rollout_num_gpus=1))
    assert plain.synced_checkpoint == plain.hf_checkpoint


def test_a_frozen_copy_of_the_same_model_takes_no_updates(configured) -> None:
    copy = POLICY | {"name": "reference", "update_weights": False}
    _, frozen = validated_args(configured([POLICY, copy])).served_models
    assert frozen.update_weights is False


def test_prefill_servers_leave_the_rest_to_decode() -> None:
    args = run_args(
        prefill_num_servers=1, rollout_num_gpus_per_engine=2, rollout_num_gpus=6, hf_checkpoint="m"
    )
    (model,) = SglangConfig.from_prefill_num_servers(args).models
    model = model.resolve(args)
    assert [(g.worker_type, g.num_gpus, g.num_engines) for g in model.server_groups] == [
        ("prefill", 2, 1),
        ("decode", 4, 2),
    ]
    assert model.has_pd_disaggregation and not model.has_encoder_disaggregation


NAMED = "model 1 (m)"
FILES: list[tuple[str, Any, str]] = [
    ("no file", None, "no such file"),
    ("not YAML", "sglang: [", ""),
    ("a list", "- 1\n", "wanted a mapping with the key sglang"),
    ("no models", "sglang: []\n", "wanted a mapping with the key sglang"),
    ("another key", "sglang: [{name: m}]\nengines: 1\n", "unknown key 'engines'"),
    ("a model of text", ["m"], "model 1 is 'm' (wanted: a mapping"),
    ("no name", [{"server_groups": [group()]}], "model 1: name is missing"),
    ("no groups", [{"name": "m"}], f"{NAMED}: server_groups is None"),
    ("a group of text", [{"name": "m", "server_groups": ["x"]}], f"{NAMED}: group 1 is 'x'"),
    ("unknown key", [{"name": "m", "modelpath": "x", "server_groups": [group()]}], f"{NAMED}: unknown key"),
    ("unknown key of a group", [{"name": "m", "server_groups": [group(gpus=1)]}], "group 1: unknown key"),
    ("unknown type", [{"name": "m", "server_groups": [group("prefil")]}], "worker_type is 'prefil' (wanted:"),
    ("no GPUs", [{"name": "m", "server_groups": [group(num_gpus=0)]}], "num_gpus is 0 (wanted: more than 0)"),
    ("no type", [{"name": "m", "server_groups": [{"num_gpus": 1}]}], "group 1: worker_type is missing"),
    ("overrides of text", [{"name": "m", "server_groups": [group(overrides="x")]}], "overrides is 'x'"),
    ("updates of text", [POLICY | {"update_weights": "no"}], "update_weights is 'no' (wanted: bool)"),
    ("twice", [POLICY, POLICY], "two models are named policy"),
    ("a name for a shell", [POLICY | {"name": "a/b"}, POLICY], "model a/b: not a name"),
    ("sum", [POLICY], "its groups have 1 GPUs in all (wanted: --rollout-num-gpus 2)"),
    ("placeholders", [{"name": "m", "server_groups": [group("placeholder", 2)]}], "has no engines"),
    ("default second", [POLICY, POLICY | {"name": "default"}], "model default is not the first"),
    (
        "frozen first",
        [POLICY | {"update_weights": False}, POLICY | {"name": "b"}],
        "model policy comes first and takes no updates",
    ),
    (
        "paths",
        [{"name": "m", "server_groups": [group(overrides={"model_path": p}) for p in ("a", "b")]}],
        "model m: its groups have different paths, a and b",
    ),
    (
        "prefill",
        [{"name": "m", "server_groups": [group("prefill"), group("decode")]}],
        "worker_type decode: the embedded engine prefills and decodes in one process",
    ),
    ("encoder", [POLICY, POLICY | {"name": "e", "server_groups": [group("encoder")]}], "rollouts send text"),
    (
        "large",
        [POLICY | {"server_groups": [group(num_gpus=16, num_gpus_per_engine=16)]}],
        "takes those of one node (wanted: at most 8)",
    ),
    (
        "remainder",
        [POLICY | {"server_groups": [group(num_gpus=2, num_gpus_per_engine=3)]}],
        "num_gpus 2: not a multiple of num_gpus_per_engine 3",
    ),
    (
        "an option that is none",
        [POLICY | {"server_groups": [group(num_gpus=2, overrides={"mem_fraction": 1})]}],
        "overrides: mem_fraction: not an option of the embedded engine",
    ),
    (
        "an option of the launcher",
        [POLICY | {"server_groups": [group(num_gpus=2, overrides={"port": 1})]}],
        "overrides: port: decided by the run",
    ),
    (
        "an option of another type",
        [POLICY | {"server_groups": [group(num_gpus=2, overrides={"context_length": "long"})]}],
        "overrides: context_length is 'long' (wanted: int)",
    ),
    (
        "a choice that is none",
        [POLICY | {"server_groups": [group(num_gpus=2, overrides={"dtype": "int3"})]}],
        "overrides: dtype is 'int3' (wanted: auto or",
    ),
    (
        "a switch of text",
        [POLICY | {"server_groups": [group(num_gpus=2, overrides={"enable_metrics": 1})]}],
        "overrides: enable_metrics is 1 (wanted: true or false)",
    ),
]


PAST = {"name": "past", "update_interval": 5, "server_groups": [{"worker_type": "regular", "num_gpus": 1}]}


def test_a_model_may_keep_earlier_versions_of_the_trained_one(configured) -> None:
    policy, past = validated_args(configured([POLICY, PAST])).served_models
    assert (policy.update_interval, past.update_interval) == (None, 5)
    assert past.update_weights


@pytest.mark.parametrize(
    ("models", "flags", "said"),
    [
        ([PAST, POLICY], {}, "past: update_interval 5: it comes first, and the first one is trained"),
        ([POLICY, PAST | {"update_weights": False}], {}, "past: update_interval 5: it takes no updates"),
        ([POLICY, PAST | {"update_interval": 0}], {}, "(past): update_interval is 0 (wanted: more than 0)"),
        (
            [POLICY, PAST],
            {"lora_rank": 4, "no_lora_merge": True},
            "past: update_interval 5: with --no-lora",
        ),
        (
            [POLICY, PAST],
            {"update_weight_mode": "delta", "update_weight_transport": "disk"},
            "past: update_interval 5: with --update-weight-mode delta",
        ),
    ],
)
def test_earlier_versions_that_nothing_could_bring_are_refused(
    configured, refusals, models, flags, said, tmp_path
) -> None:
    if "update_weight_mode" in flags:
        places = {
            "update_weight_disk_dir": tmp_path / "d",
            "update_weight_local_checkpoint_dir": tmp_path / "l",
        }
        flags |= places
    found = refusals(configured(models, **flags))
    assert any(said in line for line in found), found


@pytest.mark.parametrize(("models", "said"), [case[1:] for case in FILES], ids=[about for about, *_ in FILES])
def test_a_bad_file_is_refused_in_one_line(configured, refusal, tmp_path, models, said) -> None:
    line = configured(models or "")
    if models is None:
        (tmp_path / "fleet.yaml").unlink()
    message = refusal(line)
    assert message.startswith("--sglang-config") and said in message


def test_a_model_that_is_not_there_is_named(configured, refusal, tmp_path) -> None:
    message = refusal(configured([POLICY, judge(tmp_path / "none")]))
    assert message.startswith(f"--sglang-config: model judge: model_path {tmp_path}/none: no config.json")


def test_a_model_of_another_shape_takes_no_updates(configured, refusal, altered_checkpoint) -> None:
    path = altered_checkpoint(num_hidden_layers=2)
    message = refusal(configured([POLICY, judge(path, update_weights=True)]))
    assert "takes the trainer's weights, but its num_hidden_layers is 2 (wanted: 3" in message
    assert validated_args(configured([POLICY, judge(path)]))


def test_a_model_that_the_embedded_engine_cannot_serve_is_refused(
    configured, refusal, altered_checkpoint
) -> None:
    message = refusal(configured([POLICY, judge(altered_checkpoint(model_type="gpt2"))]))
    assert "model judge" in message and "model_type 'gpt2' is not supported" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_external_engine_addrs": "127.0.0.1:1"}, "--sglang-config and --rollout-external-engine"),
        ({"prefill_num_servers": 1}, "--sglang-config and --prefill-num-servers: only one"),
    ],
)
def test_engines_come_from_one_place(configured, refusal, changes, said) -> None:
    assert refusal(configured([POLICY, POLICY | {"name": "b"}], **changes)).startswith(said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prefill_num_servers": 2}, "--prefill-num-servers 2: takes 2 of 2 GPUs"),
        (
            {"prefill_num_servers": 1},
            "--prefill-num-servers: model default: worker_type decode: the embedded",
        ),
        ({"rollout_external": True}, "--rollout-external: needs --rollout-external-engine-addrs"),
        ({"rollout_external_engine_addrs": "one"}, "--rollout-external-engine-addrs one: wanted host:port"),
        ({"rollout_external_engine_addrs": "h:x"}, "--rollout-external-engine-addrs h:x: wanted host:port"),
        ({"rollout_external_engine_addrs": ["::1:5", "::1:5"]}, "--rollout-external-engine-addrs ::1:5: wa"),
        (
            {"rollout_external_engine_addrs": ["127.0.0.1:5", "http://127.0.0.1:5"]},
            "--rollout-external-engine-addrs 127.0.0.1:5: is there twice",
        ),
        *(
            (
                {"rollout_external_engine_addrs": [bad]},
                f"--rollout-external-engine-addrs {bad.replace(SECRET, '...')}: wanted host:port",
            )
            for bad in ("h:99999", f"{SECRET}@h:1", "http://h:1#", "h:1?", "h..b:1", "http://h")
        ),
        (
            {"rollout_external_engine_addrs": ["127.0.0.1:5", "HTTP://127.0.0.1:5/"]},
            "--rollout-external-engine-addrs 127.0.0.1:5: is there twice",
        ),
        (
            {"rollout_external_engine_addrs": "10.0.0.5:30000"},
            "--rollout-external-engine-addrs 10.0.0.5:30000: can be reached by others",
        ),
        (
            {"rollout_external_engine_addrs": "127.0.0.1:5", "colocate": True},
            "--rollout-external: the trainer shares no GPUs",
        ),
        ({"sglang_router_ip": "127.0.0.1"}, "--sglang-router-ip 127.0.0.1: needs --sglang-router-port"),
        (
            {"sglang_router_ip": "127.0.0.1", "sglang_router_port": 3, "use_slime_router": True},
            "--sglang-router-ip and --use-slime-router: only one",
        ),
        ({"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}, "--rollout-num-gpus 3: not a multiple"),
        (
            {"rollout_spare_gpus": 3, "rollout_num_gpus_per_engine": 2},
            "--rollout-spare-gpus 3: not a multiple of the 2 GPUs of an engine of model default",
        ),
        ({"rollout_spare_gpus": 2, "colocate": True}, "--rollout-spare-gpus 2: with --colocate"),
        (
            {"rollout_spare_gpus": 2, "rollout_external_engine_addrs": "127.0.0.1:5"},
            "--rollout-spare-gpus 2: the engines are somebody else's",
        ),
        ({"rollout_queue_per_engine": 0}, "--rollout-queue-per-engine 0"),
        (
            {"rollout_queue_per_engine": 8, "sglang_server_concurrency": 12},
            "--rollout-queue-per-engine 8: each has at most --sglang-server-concurrency 12, so that none",
        ),
        ({"rollout_queue_per_engine": 8, "colocate": True}, "--rollout-queue-per-engine 8: with --colocate"),
        (
            {"rollout_queue_per_engine": 8, "rollout_external_engine_addrs": "127.0.0.1:5"},
            "--rollout-queue-per-engine 8: the engines are somebody else's",
        ),
        (
            {"rollout_queue_per_engine": 8, "rollout_spare_gpus": 1, "rollout_max_engines": 4},
            "--rollout-max-engines 4: more than the places of engines (wanted: at most 3, or more",
        ),
        (
            {"rollout_queue_per_engine": 8, "rollout_min_engines": 3},
            "--rollout-min-engines 3: more than the 2 engines at most",
        ),
        (
            {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 3, "num_gpus_per_node": 2},
            "--rollout-num-gpus-per-engine 3: the embedded engine takes those of one node",
        ),
    ],
)
def test_flags_of_the_fleet_that_cannot_be(words, refusals, changes, said) -> None:
    line = words(**{"colocate": None, "rollout_num_gpus": 2} | changes)
    assert refusals(line)[0].startswith(said)


def served(*groups: dict[str, Any], **changes: Any) -> list[str]:
    """What is wrong with a model of these groups for SGLang on nodes of 4 GPUs."""
    flags = dict(
        rollout_engine="sglang",
        sglang_config="fleet.yaml",
        prefill_num_servers=None,
        num_gpus_per_node=4,
        rollout_num_gpus=sum(one["num_gpus"] for one in groups),
        colocate=False,
        offload_rollout=False,
        debug_rollout_only=False,
        use_slime_router=False,
    )
    model = ModelConfig("m", "path", True, 1, [ServerGroupConfig(**one) for one in groups])
    return list(bad_models(run_args(**{**flags, "served_models": [model], **changes})))


def test_sglang_may_prefill_and_decode_apart_unless_their_memory_is_the_trainers_too() -> None:
    halves = group("prefill"), group("decode")
    assert served(*halves) == []
    (line,) = served(*halves, colocate=True, offload_rollout=True)
    assert "prefill and decode engines cannot release their memory" in line
    assert served(*halves, use_slime_router=True) == []


@pytest.mark.parametrize("kinds", [("prefill",), ("decode",), ("prefill", "regular", "decode")])
def test_one_half_or_another_kind_among_them_is_refused(kinds: tuple[str, ...]) -> None:
    (line,) = served(*map(group, kinds))
    assert line.endswith("(wanted: prefill and decode, or regular)")


@pytest.mark.parametrize(("size", "wrong"), [(1, False), (3, False), (4, False), (8, False), (6, True)])
def test_an_engine_over_nodes_takes_whole_ones(size: int, wrong: bool) -> None:
    lines = served(group(num_gpus=24, num_gpus_per_engine=size))
    assert bool(lines) is wrong
    if wrong:
        assert "num_gpus_per_engine 6: takes a part of its last node" in lines[0]


def test_external_engines_take_no_gpus_of_the_cluster(words) -> None:
    line = words(colocate=None, rollout_external_engine_addrs=["127.0.0.1:5", "127.0.0.1:6"])
    args = validated_args(line)
    assert (args.rollout_external, args.served_models, args.rollout_num_engines) == (True, [], 2)
    assert args.rollout_num_gpus == 2


def test_a_teacher_among_the_models_needs_no_address(configured, refusal, altered_checkpoint) -> None:
    distils = {"use_opd": True, "opd_type": "sglang", "rm_type": None}
    distils["custom_rm_path"] = "slime.rollout.on_policy_distillation.reward_func"
    path = altered_checkpoint()
    assert validated_args(configured([POLICY, judge(path, name="teacher")], **distils))
    assert "needs --rm-url" in refusal(configured([POLICY, judge(path)], **distils))


def test_a_run_without_engines_is_told_that_a_file_has_no_effect(configured, notes) -> None:
    (note,) = notes(configured([POLICY], debug_train_only=True, rollout_num_gpus=None))
    assert note.startswith("--sglang-config: has no effect")


def test_an_epoch_that_fills_no_rollout_is_refused(words, refusal) -> None:
    line = words(num_rollout=None, num_epoch=3, rollout_batch_size=16)
    assert refusal(line) == (
        "--num-epoch 3: --prompt-data has 4 prompts, fewer than --rollout-batch-size 16 "
        "(wanted: --num-rollout, or more)"
    )
    assert validated_args(words(num_rollout=None, num_epoch=3)).num_epoch == 3
