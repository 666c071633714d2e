"""Every published format by hand-made lines, the shared files where they are at hand, and every way to be wrong."""

from pathlib import Path

import pytest

from examples.slos import SLO_TABLES
from examples.traces import Row, TraceError, read_trace
from scheduling.request import SLO

SHARED = Path(__file__).parents[2] / "shared" / "traces"
TYPES = SLO_TABLES["llama3-8b"]


@pytest.fixture
def write(tmp_path):
    def write(text, name="trace"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


# Formats


def test_azure(write):
    trace = read_trace(
        write(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,374,44\n"
            "2023-11-16 18:15:46.6805901,396,109\n"  # 100 ns later
            "2023-11-16 18:16:00,879,55\n"
        )
    )
    assert [(row.prompt_tokens, row.output_tokens) for row in trace.rows] == [(374, 44), (396, 109), (879, 55)]
    assert [row.time for row in trace.rows] == pytest.approx([0.0, 1e-7, 13.31941], abs=3e-8)
    assert trace.rate == pytest.approx(2 / 13.31941)


def test_azure_of_2024_has_time_zones(write):
    trace = read_trace(
        write(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.019930+00:00,2399,6\n"
        )
    )
    assert trace.rows[1].time == pytest.approx(0.01)


def test_mooncake_counts_milliseconds_and_512_token_blocks(write):
    trace = read_trace(
        write(
            '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
            '{"timestamp": 30535, "input_length": 500, "output_length": 26, "hash_ids": [46]}\n'
            '{"timestamp": 30535, "input_length": 500, "output_length": 26, "hash_ids": [48]}\n'  # a coarse clock
        )
    )
    assert trace.rows[0] == Row(600, 52, 0.0, blocks=(46, 47))
    assert [row.time for row in trace.rows] == pytest.approx([0.0, 3.053, 3.053])
    assert trace.block_tokens == 512


QWEN = """\
{"chat_id": 55, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 40, "output_length": 9, "type": "text", \
"turn": 1, "hash_ids": [1, 2, 3]}
{"chat_id": 60, "parent_chat_id": 55, "timestamp": 62.5, "input_length": 90, "output_length": 8, "type": "text", \
"turn": 2, "hash_ids": [1, 2, 3, 4, 5, 6]}
{"chat_id": 61, "parent_chat_id": 55, "timestamp": 63.0, "input_length": 90, "output_length": 7, "type": "search", \
"turn": 2, "hash_ids": [1, 2, 3, 4, 5, 6]}
{"chat_id": 62, "parent_chat_id": 7, "timestamp": 64.0, "input_length": 20, "output_length": 6, "type": "text", \
"turn": 3, "hash_ids": [8, 9]}
"""


def test_qwen_bailian_counts_only_the_new_tokens_of_a_text(write):
    trace = read_trace(write(QWEN), types=TYPES)
    assert [row.time for row in trace.rows] == [0.0, 1.5, 2.0, 3.0]
    assert [row.label for row in trace.rows] == ["text", "text", "search", "text"]
    # 6 blocks less the parent's 3, of 16 tokens; a search keeps its history, as does a text of an unknown parent.
    assert [row.prompt_tokens for row in trace.rows] == [40, 48, 90, 20]
    assert trace.rows[1].blocks == (4, 5, 6)
    assert trace.block_tokens == 16


def test_qwen_bailian_with_history(write):
    trace = read_trace(write(QWEN), types=TYPES, keep_history=True)
    assert [row.prompt_tokens for row in trace.rows] == [40, 90, 90, 20]
    assert trace.rows[1].blocks == (1, 2, 3, 4, 5, 6)


def test_a_plain_length_file_has_no_times(write):
    trace = read_trace(write("num_prefill_tokens,num_decode_tokens,pd_ratio\n74,918,0.08\n290,905,0.32\n"))
    assert [(row.prompt_tokens, row.output_tokens) for row in trace.rows] == [(74, 918), (290, 905)]
    assert (trace.timed, trace.rate, trace.seconds) == (False, None, 0.0)


def test_a_small_trace_may_bring_its_own_targets(write):
    trace = read_trace(write("\ufefftime,prompt,output,slo,tbt\n0,100,5,6,\n0.5,10,5,,0.1\n", "three.csv"))
    assert trace.rows == (Row(100, 5, 0.0, slo=SLO(ttft=6.0)), Row(10, 5, 0.5, slo=SLO(tbt=0.1)))
    assert trace.name == "three.csv"


@pytest.mark.skipif(not SHARED.exists(), reason="the real traces are not at hand")
@pytest.mark.parametrize(
    ("name", "rows", "rate"),
    [
        ("qwentrace_A_first2min_recovered.csv", 327, 326 / 119.08),
        ("azure2023_conv.csv", 19366, 5.530),
        ("mooncake_conversation.csv", 12031, 3.401),
        ("mooncake_conversation_first20min_hash.jsonl", 3658, 3.048),
        ("sharegpt_8k_sarathi.csv", 30731, None),
        ("arxiv_summarization_vidur.csv", 28257, None),
    ],
)
def test_the_real_files(name, rows, rate):
    trace = read_trace(SHARED / name, types=TYPES, allow_equal_times=name.startswith("azure"))
    assert len(trace.rows) == rows
    assert trace.rate == (None if rate is None else pytest.approx(rate, abs=1e-3))


# What is wrong, and where

CSV = "time,type,prompt,output\n0,text,5,5\n"
JSON = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": []}\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "line 1: the file is empty"),
        ("\n\n", "line 1: the file is empty"),
        ("prompt_len,output_len\n", "line 1: a header and no rows"),
        ("prompt_len\n5\n", "line 1, output_len: no column for output tokens: expected one of output_len, Generated"),
        ("type,output_len\ntext,5\n", "line 1, prompt_len: no column for prompt tokens"),
        (
            "TIMESTAMP,GeneratedTokens\n",
            "line 1, prompt_len: no column for prompt tokens: expected one of prompt_len, Co",
        ),
        (CSV + "1,video,5,5\n", "line 3, type: 'video' is none of text, image, search, file"),
        (CSV + "1,text,-5,5\n", "line 3, prompt: -5 is not a number of tokens, at least 1"),
        (CSV + "1,text,5,0\n", "line 3, output: 0 is not a number of tokens, at least 1"),
        (CSV + "1,text,2.5,5\n", "line 3, prompt: 2.5 is not a number of tokens"),
        (CSV + "1,text,many,5\n", "line 3, prompt: 'many' is not a number"),
        (CSV + "1,text,5\n", "line 3, output: missing"),
        (CSV + "nan,text,5,5\n", "line 3, time: 'nan' is not a number"),
        (CSV + "-1,text,5,5\n", "line 3, time: -1 is negative"),
        (CSV + "2,text,5,5\n1,text,5,5\n", "line 4, time: 1 s before the line above: not sorted"),
        (CSV + "0,text,5,5\n", "line 3, time: the same as in the line above (--allow-equal-times"),
        ("time,prompt,output,slo\n0,5,5,-1\n", "line 2, slo: -1 is not a target in seconds, above 0"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "line 2, TIMESTAMP: 'yesterday' is not a date"),
        (JSON + '{"timestamp": 1, "output_length": 5}\n', "line 2, input_length: missing"),
        (
            JSON + '{"timestamp": 1, "input_length": -5, "output_length": 5}\n',
            "line 2, input_length: -5 is not a number",
        ),
        (
            JSON + '{"timestamp": true, "input_length": 5, "output_length": 5}\n',
            "line 2, timestamp: True is not a number",
        ),
        (CSV + "1,text,5,1e300\n", "line 3, output: 1e300 tokens are more than 100,000,000"),
        (CSV + "1e300,text,5,5\n", "line 3, time: 1e300 is beyond any recording"),
        (CSV + "1,text,5,5,7\n", "line 3: 1 more than the header's 4 fields"),
        ("time,prompt,prompt,output\n0,5,6,5\n", "line 1, prompt: two columns of this name"),
        (
            "a;b\n",
            "line 1, prompt_len: no column for prompt tokens: expected one of prompt_len, ContextTokens, prompt, "
            "num_prefill_tokens, among 'a;b'",
        ),
        (CSV + "1," + 200_000 * "x" + ",5,5\n", "line 3: not CSV: field larger than field limit"),
        (JSON + '{"a":' * 100_000, "line 2: not a JSON object: maximum recursion depth"),
        (JSON + JSON.replace("5", 400 * "9", 1), "line 2, input_length: 9999"),
        (QWEN.replace('"chat_id": 55', '"chat_id": [1]'), "line 1, chat_id: [1] is not the number or name of a chat"),
        (JSON + "[1]\n", "line 2: not a JSON object: [1]"),
        (JSON + '{"timestamp": 1', "line 2: not a JSON object: "),
        (JSON.replace("[]", '["a"]'), "line 1, hash_ids: not a list of whole numbers"),
        (QWEN.replace('"type": "search", ', ""), "line 3, type: missing"),
        (QWEN.replace("64.0", "63.0"), "line 4, timestamp: the same as in the line above"),
    ],
)
def test_errors_name_file_line_and_field(write, text, error):
    path = write(text, "bad.trace")
    with pytest.raises(TraceError) as raised:
        read_trace(path, types=TYPES)
    assert str(raised.value).startswith(f"{path}, {error}")


def test_equal_times_can_be_taken_as_a_burst(write):
    trace = read_trace(write(CSV + "0,text,6,5\n"), allow_equal_times=True)
    assert [row.time for row in trace.rows] == [0.0, 0.0]


def test_columns_may_be_set_off_by_spaces(write):
    trace = read_trace(write("time, type, prompt, output\n0, text, 5, 6\n"))
    assert trace.rows == (Row(5, 6, 0.0, "text"),)


def test_milliseconds_since_1970_are_times(write):
    line = '{"timestamp": %d, "input_length": 5, "output_length": 5}\n'
    trace = read_trace(write(line % 1_790_000_000_000 + line % 1_790_000_000_250))
    assert trace.rows[1].time == pytest.approx(0.25)


def test_blocks_count_though_the_first_row_has_none(write):
    trace = read_trace(write(JSON + JSON.replace("0,", "1,", 1).replace("[]", "[7]")))
    assert trace.block_tokens == 512 and trace.rows[1].blocks == (7,)


def test_what_is_not_text_is_told(tmp_path):
    path = tmp_path / "image.csv"
    path.write_bytes(b"prompt_len,output_len\n\xff\xfe\n")
    with pytest.raises(TraceError, match="line 2: not UTF-8 text"):
        read_trace(path)
