"""Evaluation datasets from flags and from YAML."""

import pytest

from slime.arguments import UsageError
from slime.arguments.groups import eval_datasets
from slime.arguments.groups.eval_datasets import resolve_eval_datasets
from slime.config.evaluation import EvalDatasetConfig
from slime.utils import eval_config
from tests.run_args import run_args

FLAGS = {
    **dict(eval_config=None, eval_prompt_data=None, n_samples_per_eval_prompt=2, n_samples_per_prompt=8),
    **dict(eval_temperature=None, rollout_temperature=0.7, eval_top_p=None, rollout_top_p=1.0),
    **dict(eval_top_k=5, rollout_top_k=-1, eval_max_response_len=None, rollout_max_response_len=64),
    **dict(rollout_stop=["###"], rollout_stop_token_ids=None, eval_min_new_tokens=None),
    **dict(eval_input_key=None, input_key="input", eval_label_key="answer", label_key="label"),
    **dict(eval_tool_key=None, tool_key="tools", metadata_key="metadata", apply_chat_template=True),
    **dict(apply_chat_template_kwargs={}, custom_rm_path=None),
}


def resolve(**changes):
    args = run_args(**(FLAGS | changes))
    resolve_eval_datasets(args)
    return args


def from_yaml(tmp_path, text, **changes):
    (tmp_path / "eval.yaml").write_text(text)
    return resolve(eval_config=str(tmp_path / "eval.yaml"), **changes)


def test_without_data_there_is_no_dataset():
    args = resolve()
    assert (args.eval_datasets, args.eval_prompt_data) == ([], None)


def test_pairs_of_name_and_file():
    args = resolve(eval_prompt_data=["a", "a.jsonl", "b", "b.jsonl"])
    assert [(d.name, d.path) for d in args.eval_datasets] == [("a", "a.jsonl"), ("b", "b.jsonl")]
    assert args.eval_prompt_data == ["a", "a.jsonl", "b", "b.jsonl"]


def test_a_single_file_is_named_aime():
    assert resolve(eval_prompt_data=["x.jsonl"]).eval_prompt_data == ["aime", "x.jsonl"]


def test_an_odd_word_is_refused():
    with pytest.raises(UsageError, match="wanted pairs of name and file"):
        resolve(eval_prompt_data=["a", "a.jsonl", "b"])


def test_open_fields_come_from_the_first_flag_that_is_set():
    (dataset,) = resolve(eval_prompt_data=["x.jsonl"]).eval_datasets
    assert (dataset.n_samples_per_eval_prompt, dataset.temperature, dataset.top_k) == (2, 0.7, 5)
    assert (dataset.max_response_len, dataset.stop) == (64, ["###"])
    assert (dataset.input_key, dataset.label_key) == ("input", "answer")


def test_an_entry_wins_over_defaults_and_those_over_flags(tmp_path):
    text = """
    eval:
      defaults: {temperature: 0.5, top_k: 3, max_response_len: 9}
      datasets:
        - {name: a, path: a.jsonl, temperature: 0}
        - {name: b, path: b.jsonl, max_response_len: null}
    """
    a, b = from_yaml(tmp_path, text).eval_datasets
    assert (a.temperature, a.top_k, a.max_response_len, a.top_p) == (0, 3, 9, 1.0)
    assert (b.temperature, b.max_response_len) == (0.5, None)


def test_the_root_may_be_the_eval_mapping_and_datasets_a_mapping(tmp_path):
    args = from_yaml(tmp_path, "datasets: {a: {path: a.jsonl}, b: {path: b.jsonl, top_k: 1}}\n")
    assert [(d.name, d.top_k) for d in args.eval_datasets] == [("a", 5), ("b", 1)]


def test_interpolations_are_resolved(tmp_path):
    text = "root: /data\neval: {datasets: [{name: a, path: '${root}/a.jsonl'}]}\n"
    assert from_yaml(tmp_path, text).eval_prompt_data == ["a", "/data/a.jsonl"]


def one(line):
    return f"datasets: [{{name: a, path: a.jsonl, {line}}}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: []\n", r"has no datasets \(wanted: datasets, a list\)"),
        ("- 1\n", "wanted a mapping with datasets"),
        ("datasets: [{path: a.jsonl}]\n", "name is missing"),
        ("datasets: [{name: a}]\n", "dataset a: path is missing"),
        ("datasets: [{name: a, path: b, temprature: 1}]\n", "dataset a: unknown key 'temprature'"),
        (
            "defaults: {temprature: 1}\ndatasets: [{name: a, path: b}]\n",
            "defaults: unknown key 'temprature'",
        ),
        ("defaults: [1]\ndatasets: [{name: a, path: b}]\n", "defaults is list"),
        ("datasets: [a.jsonl]\n", "a dataset is 'a.jsonl'"),
        ("datasets: [\n", "--eval-config .*eval.yaml: "),
        ("datasets: [{name: a, path: '${nothing}'}]\n", "nothing"),
        ("datasets: [{name: a, path: '???'}]\n", "Missing mandatory value"),
        ("datasets: [{name: a, path: 5}]\n", r"dataset a: path is 5 \(wanted: str\)"),
        ("datasets: [{name: 5, path: a}]\n", r"dataset 5: name is 5 \(wanted: str\)"),
        ("datasets: {a: 5}\n", r"dataset a is 5 \(wanted: a mapping\)"),
        ("datasets: 5\n", r"datasets is 5 \(wanted: a list of mappings\)"),
        (
            "default: {top_k: 1}\ndatasets: [{name: a, path: b}]\n",
            "unknown key 'default' .did you mean defaults",
        ),
        (one("metadata_overrides: [1]"), r"metadata_overrides is \[1\] \(wanted: mapping\)"),
        (one("n_samples_per_eval_prompt: null"), r"n_samples_per_eval_prompt is None \(wanted: int\)"),
        (one("n_samples_per_eval_prompt: 0"), r"n_samples_per_eval_prompt is 0 \(wanted: more than 0\)"),
        (one("input_key: null"), r"input_key is None \(wanted: str\)"),
        (one("temperature: -1"), r"temperature is -1 \(wanted: 0 or more\)"),
        (one("temperature: .nan"), r"temperature is nan \(wanted: a finite number, 0 or more\)"),
        (one("temperature: hot"), r"temperature is 'hot' \(wanted: float\)"),
        (one("top_p: 2"), r"top_p is 2 \(wanted: more than 0, at most 1\)"),
        (one("top_k: 0"), r"top_k is 0 \(wanted: 1 or more, or -1\)"),
        (one("max_response_len: 1.5"), r"max_response_len is 1.5 \(wanted: int\)"),
        (one("min_new_tokens: -1"), r"min_new_tokens is -1 \(wanted: 0 or more\)"),
        (one("repetition_penalty: 0"), r"repetition_penalty is 0 \(wanted: more than 0, at most 2\)"),
        (one("stop: '###'"), r"stop is '###' \(wanted: list of str\)"),
        (one("stop_token_ids: [x]"), r"stop_token_ids is \['x'\] \(wanted: int\)"),
        (one("apply_chat_template: 'no'"), r"apply_chat_template is 'no' \(wanted: bool\)"),
        ("datasets: [{name: a, path: x}, {name: a, path: y}]\n", "--eval-config: two datasets are named a"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        from_yaml(tmp_path, text)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "eval.yaml").write_bytes("datasets: [{name: é, path: a}]".encode("latin-1"))
    with pytest.raises(UsageError, match=r"--eval-config .*eval\.yaml: not UTF-8"):
        resolve(eval_config=str(tmp_path / "eval.yaml"))


def test_a_name_given_twice_on_the_command_line_is_refused():
    with pytest.raises(UsageError, match="--eval-prompt-data: two datasets are named a"):
        resolve(eval_prompt_data=["a", "x.jsonl", "a", "y.jsonl"])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no\.yaml"):
        resolve(eval_config=str(tmp_path / "no.yaml"))


def test_metadata_gets_the_reward_type_and_the_overrides():
    dataset = EvalDatasetConfig("a", "a.jsonl", rm_type="math", metadata_overrides={"level": 2})
    original = {"level": 1, "source": "x"}
    assert dataset.inject_metadata(original) == {"level": 2, "source": "x", "rm_type": "math"}
    assert original == {"level": 1, "source": "x"}
    assert EvalDatasetConfig("a", "a.jsonl").inject_metadata(None) == {}


def test_the_cache_key_ignores_how_samples_are_drawn():
    one, two = (EvalDatasetConfig("a", "a.jsonl", temperature=t) for t in (0.0, 1.0))
    assert one.cache_key == two.cache_key
    assert one.cache_key != EvalDatasetConfig("a", "a.jsonl", input_key="q").cache_key


def test_plug_ins_find_everything_under_the_old_path():
    assert all(getattr(eval_config, name) is getattr(eval_datasets, name) for name in eval_config.__all__)


def test_what_only_evaluation_functions_of_users_read_is_taken(tmp_path):
    """Keys of the original's files that its own evaluation stores and passes over."""
    keys = ["min_eval_samples: 4", "eval_task_timeout: 60"]
    keys += ["app_service: {url: http://a}", "message_processor: a.b"]
    own = "\n    ".join(keys)
    (tmp_path / "eval.yaml").write_text(f"eval:\n  datasets:\n  - name: a\n    path: a.jsonl\n    {own}\n")
    (dataset,) = resolve(eval_config=str(tmp_path / "eval.yaml")).eval_datasets
    assert (dataset.min_eval_samples, dataset.eval_task_timeout) == (4, 60.0)
    assert (dataset.app_service, dataset.message_processor) == ({"url": "http://a"}, "a.b")
    with pytest.raises(UsageError, match="min_eval_samples is 0"):
        text = (tmp_path / "eval.yaml").read_text().replace("samples: 4", "samples: 0")
        from_yaml(tmp_path, text)
