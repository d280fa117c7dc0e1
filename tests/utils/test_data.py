import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.utils.data import DataError, Dataset, read_file
from slime.utils.notes import take_notes
from tools.make_tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def numbers(tmp_path):
    path = tmp_path / "numbers.jsonl"
    path.write_text("\n".join(json.dumps({"n": n}) for n in range(5)) + "\n\n")
    return path


def write_lines(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("suffix", "wanted"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("@[1:3]", [1, 2]),
        ("@[:2]", [0, 1]),
        ("@[3:]", [3, 4]),
        ("@[-2:]", [3, 4]),
        ("@[1:-1]", [1, 2, 3]),
    ],
)
def test_a_suffix_selects_records_as_a_slice_does(numbers, suffix, wanted):
    assert [record["n"] for record in read_file(f"{numbers}{suffix}")] == wanted
    table = numbers.with_suffix(".parquet")
    pq.write_table(pa.table({"n": range(5)}), table)
    assert [record["n"] for record in read_file(f"{table}{suffix}")] == wanted


@pytest.mark.parametrize("suffix", ["@[4:2]", "@[9:]", "@[:0]", "@[:-5]"])
def test_a_slice_without_a_record_is_an_error(numbers, suffix):
    table = numbers.with_suffix(".parquet")
    pq.write_table(pa.table({"n": range(5)}), table)
    for file in (numbers, table):
        with pytest.raises(DataError, match=re.escape(f"{file}: holds no record in the slice {suffix}")):
            list(read_file(f"{file}{suffix}"))


@pytest.mark.parametrize("suffix", ["@[:]", "@[999999999999999999:]", "@[9999999999999999999:]"])
def test_odd_slices_do_not_break_the_reader(numbers, suffix):
    try:
        assert len(list(read_file(f"{numbers}{suffix}"))) == 5
    except DataError as error:
        assert "holds no record" in str(error) or "no such data file" in str(error)


@pytest.mark.parametrize("content", ["", "\n", "  \n\t\n"])
def test_a_file_without_a_record_is_an_error(tmp_path, content):
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"data.jsonl: holds no record$"):
        list(read_file(str(tmp_path / "data.jsonl")))


def test_a_table_without_a_row_is_an_error(tmp_path):
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"data.parquet: holds no record$"):
        list(read_file(str(tmp_path / "data.parquet")))


def test_parquet_keeps_nested_values(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": messages, "tags": ["a", "b"]}]), path)
    assert list(read_file(str(path))) == [{"prompt": messages, "tags": ["a", "b"]}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((["{}", "{oops"]), r"data.jsonl:2: not valid JSON"),
        ((["{}", "", "[1]"]), r"data.jsonl:3: expected a JSON object, found list"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        list(read_file(write_lines(tmp_path, *lines)))


def test_a_missing_or_foreign_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.jsonl: no such data file"):
        list(read_file(str(tmp_path / "nowhere.jsonl")))
    (tmp_path / "data.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"found suffix '.csv', expected .jsonl or .parquet"):
        list(read_file(str(tmp_path / "data.csv")))
    (tmp_path / "data.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"data.parquet: not a parquet file"):
        list(read_file(str(tmp_path / "data.parquet")))


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"text": "a"}, {"prompt_key": "prompt"}, r":1 has no field 'prompt' \(found: text\)"),
        ({"text": 3.5}, {}, r":1: field 'text' is 3.5, expected text or a list of messages"),
        ({"text": "a", "answer": None}, {"label_key": "answer"}, r":1: field 'answer' is null"),
        ({"text": "a"}, {"label_key": "answer"}, r":1 has no field 'answer'"),
        ({"text": "a", "metadata": "[]"}, {}, r":1: metadata are list, expected an object"),
        ({"text": "a", "tools": "{"}, {"tool_key": "tools"}, r":1: tools are not valid JSON"),
        ({"text": "a", "metadata": 5}, {}, r":1: metadata are int, expected an object"),
        ({"text": "a", "tools": {}}, {"tool_key": "tools"}, r":1: tools are dict, expected a list"),
        ({"text": " \n"}, {}, r":1: field 'text' is blank"),
        ({"text": []}, {}, r":1: field 'text' is \[\], expected text or a list of messages"),
        (
            {"text": [{"role": "user"}]},
            {},
            r":1: {'role': 'user'} in field 'text' is not a message with content",
        ),
        (
            {"text": [{"role": "assistant", "content": None, "tool_calls": None, "name": ""}]},
            {},
            r"'name': ''} in field 'text' is not a message with content",
        ),
        (
            {"text": [{"role": "user", "content": 5}]},
            {},
            r"'content': 5} in field 'text' is not a message with cont",
        ),
        ({"text": [{"no": "role"}]}, {}, r":1: {'no': 'role'} in field 'text' is not a message with a role"),
        ({"text": "a"}, {"apply_chat_template": True}, r":1: the chat template fails .*what a prompt"),
        ({"text": "a" * 9}, {"max_length": 8}, r"no prompt of at most 8 tokens among 1 records"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(tmp_path, record, options, message):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('what a prompt') }}"
    with pytest.raises(DataError, match=message):
        Dataset(write_lines(tmp_path, record), tokenizer, **options)


@pytest.mark.parametrize(
    "fields",
    [
        {"content": None, "tool_calls": [{"name": "f"}]},
        {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"reasoning_content": "2 is even"},
    ],
)
def test_another_field_may_stand_in_for_content(tmp_path, tokenizer, fields):
    call = {"role": "assistant"} | fields
    path = write_lines(tmp_path, {"text": [{"role": "user", "content": "hi"}, call]})
    assert Dataset(path, tokenizer)[0].prompt[1] == call


def test_the_chat_template_is_applied_to_text_and_to_messages(tmp_path, tokenizer):
    path = write_lines(tmp_path, {"text": "hi"}, {"text": [{"role": "user", "content": "hi"}]})
    prompts = [s.prompt for s in Dataset(path, tokenizer, apply_chat_template=True).samples]
    assert prompts == ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"] * 2
    plain = Dataset(path, tokenizer).samples
    assert [plain[0].prompt, plain[1].prompt] == ["hi", [{"role": "user", "content": "hi"}]]


def test_template_arguments_and_tools_reach_the_template(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ mood }} {{ tools[0]['name'] }} {{ messages[0]['content'] }}"
    path = write_lines(tmp_path, {"text": "hi", "tools": json.dumps([{"name": "calc"}])})
    dataset = Dataset(
        path,
        tokenizer,
        tool_key="tools",
        apply_chat_template=True,
        apply_chat_template_kwargs={"mood": "good"},
    )
    assert dataset[0].prompt == "good calc hi"
    assert dataset[0].metadata == {"tools": [{"name": "calc"}]}


def test_long_prompts_are_left_out_in_order(tmp_path, tokenizer):
    path = write_lines(tmp_path, *({"text": "x" * n} for n in (3, 9, 1, 8)))
    assert [len(s.prompt) for s in Dataset(path, tokenizer, max_length=8).samples] == [3, 1, 8]


def test_each_epoch_has_its_own_order_which_repeats(tmp_path, tokenizer):
    path = write_lines(tmp_path, *({"text": str(n)} for n in range(20)))

    def order(epochs, seed=1):
        dataset = Dataset(path, tokenizer, seed=seed)
        for epoch in epochs:
            dataset.shuffle(epoch)
        return [s.prompt for s in dataset.samples]

    assert order([0]) != order([1])
    assert order([0, 1]) == order([1]) == order([1, 1])
    assert order([1], seed=2) != order([1])
    assert sorted(order([3]), key=int) == [str(n) for n in range(20)]


def test_reading_reports_the_true_line_after_blank_lines(tmp_path):
    path = write_lines(tmp_path, "", "", "nope")
    with pytest.raises(DataError) as error:
        list(read_file(path))
    assert re.search(r"data\.jsonl:3:", str(error.value))


def test_prompts_that_are_numbers_are_text_and_told(tmp_path, tokenizer):
    """The data of tau-bench: --input-key index."""
    path = write_lines(tmp_path, {"index": 3, "label": 7}, {"index": 4, "label": 8})
    take_notes()
    dataset = Dataset(path, tokenizer, prompt_key="index", label_key="label")
    assert [(sample.prompt, sample.label) for sample in (dataset[0], dataset[1])] == [("3", 7), ("4", 8)]
    (told,) = [text for text in take_notes() if "'index'" in text]
    assert "holds numbers" in told
    with pytest.raises(DataError, match="expected text or a list"):
        Dataset(write_lines(tmp_path, {"index": True}), tokenizer, prompt_key="index")
