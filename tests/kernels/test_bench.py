"""The kernel benchmarks where no GPU is needed: names, rows, ratios, floors, reports, and the error without a GPU."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.kernels import __main__ as program
from bench.kernels import eager, quoted, report
from bench.kernels.case import Case, Session, relative_error
from bench.kernels.peer_kit import FILES, MissingPeerError, PeerKit
from kimi_kernels.testing.ceilings import Ceilings
from kimi_kernels.testing.timing import num_sets, summarise

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = Ceilings(read=4600.0, copy=4280.0, update=4260.0, bf16=687.0, fp8=1307.0, node_us=0.87)


def peer(name: str, us: float | None, **more: object) -> report.PeerRow:
    status = more.pop("status", report.MEASURED)
    return report.PeerRow(name, status, us, **more)  # type: ignore[arg-type]


def row(us: float | None = 2.0, peers: tuple = (), **more: object) -> report.Row:
    return report.Row("routing.topk", {"T": 1, "E": 896}, us, peers=list(peers), **more)  # type: ignore[arg-type]


# ---- names ----------------------------------------------------------------------------------------------------------


def modules_there() -> list[str]:
    names = [f"bench.kernels.{module}" for modules in program.FAMILIES.values() for module in modules]
    return [name for name in names if importlib.util.find_spec(name) is not None]


def test_every_case_has_a_name_of_its_own_and_a_public_operation() -> None:
    from kimi_kernels._dispatch import OPERATIONS

    names = [case.name for case in program.load_cases()]
    assert len(names) == len(set(names)) > 0
    parts = {case.operation for case in program.load_cases() if case.operation not in OPERATIONS}
    assert all(name.startswith("moe.") for name in parts), parts  # parts of an operation may be listed too


def test_list_needs_no_gpu() -> None:
    command = [sys.executable, "-m", "bench.kernels", "--list", "--only", "routing,norm.rms"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "routing.topk[T=8192,E=896,k=16]" in lines
    assert not any(line.startswith("attn_res") for line in lines)
    assert "torch eager" in lines[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_running_without_a_gpu_says_so(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert program.main(["--only", "routing.topk", "--out", str(tmp_path)]) == 2
    assert "CUDA GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []  # no empty report


def test_a_pattern_that_names_nothing_is_an_error(capsys: pytest.CaptureFixture) -> None:
    assert program.main(["--list", "--only", "routing.topkk"]) == 2
    assert "routing.topkk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("routing", {"routing.topk[T=1]", "routing.topk[T=16]", "routing.dispatch[T=1]"}),
        ("routing.topk", {"routing.topk[T=1]", "routing.topk[T=16]"}),
        ("routing.topk[T=1]", {"routing.topk[T=1]"}),
        ("*[T=1]", {"routing.topk[T=1]", "routing.dispatch[T=1]", "norm.rms[T=1]"}),
        ("T=16", {"routing.topk[T=16]"}),
    ],
)
def test_patterns(pattern: str, expected: set[str]) -> None:
    def never(session: Session) -> None:
        raise AssertionError("choosing must not prepare")

    shapes = (("routing.topk", 1), ("routing.topk", 16), ("routing.dispatch", 1), ("norm.rms", 1))
    cases = [Case(operation, {"T": tokens}, never) for operation, tokens in shapes]  # type: ignore[arg-type]
    assert {case.name for case in program.choose(cases, [pattern])} == expected


def test_commas_inside_brackets_do_not_split() -> None:
    assert program.split_patterns("routing, kda.decode_[H=12,B=1],") == ["routing", "kda.decode_[H=12,B=1]"]
    assert program.families_of(["kda.decode_[H=12,B=1]", "routing"]) == ["routing", "kda"]
    assert program.families_of(["routing", "T=16"]) == list(program.FAMILIES)


# The smallest case of each row of the first kernels; the references answer in place of kernels here.
SMALL = [
    case
    for case in program.load_cases(["routing", "attn_res", "norm", "quant", "moe"])
    if (case.family != "moe" or case.operation == "moe.finalize") and case.shape.get("T") == 16
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself runs these")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cases_prepare_check_and_call_every_side(case: Case) -> None:
    session = Session(torch.device("cpu"), PeerKit(None))
    session.num_sets = lambda *_, **__: 2  # type: ignore[method-assign]
    prepared = case.prepare(session)
    assert prepared.read_bytes > 0 < prepared.write_bytes
    calls = prepared.ours.calls()
    assert len(calls) == 2
    assert prepared.ours.check is not None
    assert prepared.ours.check() <= prepared.ours.tolerance
    for call in calls:
        call()
    ran = []
    for side in prepared.peers:
        try:
            for call in side.calls():
                call()
            ran.append(side.name)
        except MissingPeerError:
            assert side.name.startswith("vLLM")
    assert ran == ["torch eager"]


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_ratio_is_the_best_peers_time_over_ours() -> None:
    measured = row(2.0, (peer("slow", 9.0), peer("fast", 5.0)))
    assert measured.ratio == pytest.approx(2.5)
    assert measured.best_peer.name == "fast"
    assert row(2.0).ratio is None
    assert row(None, (peer("fast", 5.0),)).ratio is None


def test_ratio_never_uses_a_peer_that_does_less_or_is_wrong() -> None:
    less = peer("recurrence only", 1.0, comparable=False)
    wrong = peer("wrong", 1.5, error=0.5, tolerance=5e-3)
    nan = peer("nan", 1.6, error=math.nan, tolerance=5e-3)
    right = peer("right", 4.0, error=1e-3, tolerance=5e-3)
    measured = row(2.0, (less, wrong, nan, right))
    assert measured.best_peer.name == "right"
    assert measured.failed  # a peer that is wrong here is called wrongly here: that must be seen
    assert not row(2.0, (less, right)).failed


def test_a_limit_on_a_side_that_does_less_is_reported_and_is_no_ratio() -> None:
    measured = row(4.0, (peer("one step", 2.0, comparable=False, limit=2.2),))
    assert measured.ratio is None
    assert "ours takes 2.00 times as long, at most 2.2 wanted" in report.peer_cells(measured, measured.peers[0], "")[-1]
    assert "times as long" not in report.peer_cells(row(None, tuple(measured.peers)), measured.peers[0], "")[-1]


def test_a_quoted_time_takes_part_and_shows_its_date() -> None:
    old = peer("old", 1.0, status=report.QUOTED)
    assert row(2.0, (old, peer("torch eager", 8.0))).ratio == pytest.approx(0.5)  # no flattery by a missing kit
    assert row(2.0, (old, peer("new", 0.5))).ratio == pytest.approx(0.25)
    assert f"1.00 (quoted {quoted.DATE})" in report.row_cells(row(2.0, (old,)), quoted.DATE)


@pytest.mark.parametrize("error", [6e-3, math.inf, math.nan])
def test_a_failing_check_marks_the_row_and_the_exit_status(error: float) -> None:
    bad, good = row(error=error, tolerance=5e-3), row(error=4e-3, tolerance=5e-3)
    assert (report.exit_status([good]), report.exit_status([good, bad])) == (0, 1)
    assert "WRONG" in report.markdown([good, bad], {}, {}, quoted.DATE)
    assert "WRONG" not in report.markdown([good], {}, {}, quoted.DATE)


def test_a_side_that_broke_is_a_failure_and_a_missing_peer_is_not() -> None:
    assert report.exit_status([row(None, failure="KernelUnavailableError: no kernel")]) == 1
    assert report.exit_status([row(2.0, (peer("x", None, status=report.FAILED, why="boom"),))]) == 1
    assert report.exit_status([row(2.0, (peer("x", None, status=report.MISSING, why="not packed"),))]) == 0


def test_report_names_card_operation_commit_and_has_the_ratio_column() -> None:
    run = {"device": "NVIDIA H200", "commit": "0123456789ab", "KIMI_KERNELS_REFERENCE": "moe.experts"}
    measured = row(2.0, (peer("vLLM grouped_topk", 5.0),), moved_bytes=4e3, floor_us=1.0, error=1e-7, tolerance=1e-5)
    text = report.markdown([measured], run, {"read": 4600.0, "node_us": 0.87}, quoted.DATE)
    assert text.splitlines()[0] == "# NVIDIA H200: routing.topk"
    assert "- commit: 0123456789ab" in text
    assert "- KIMI_KERNELS_REFERENCE: moe.experts" in text
    header = next(line for line in text.splitlines() if line.startswith("| shape | ours us"))
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    line = next(line for line in text.splitlines() if line.startswith("| T=1, E=896 |"))
    cells = dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
    expected = {"ratio": "2.50", "best peer": "vLLM grouped_topk", "GB/s": "2", "% of floor": "50", "error": "1.0e-07"}
    assert {key: cells[key] for key in expected} == expected


def test_a_row_that_ran_the_reference_says_so() -> None:
    assert "torch reference" in report.row_cells(row(2.0, reference=True), quoted.DATE)[-1]


def test_json_holds_the_rows_and_what_follows_from_them() -> None:
    data = json.loads(report.as_json([row(2.0, (peer("fast", 5.0),))], {"commit": "x"}, {"read": 4600.0}))
    assert data["rows"][0]["ratio"] == pytest.approx(2.5)
    assert data["rows"][0]["best_peer"] == "fast"
    assert data["rows"][0]["shape"] == {"T": 1, "E": 896}
    assert data["run"] == {"commit": "x"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.876, "0.876"), (5.54, "5.54"), (59.04, "59.0"), (902.4, "902"), (13440.0, "13,440"), (0.0, "0")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert report.number(value) == text


def test_report_name() -> None:
    path = program.report_path(Path("results"), "NVIDIA H200", "kda")
    assert path.name.endswith("-h200-kda.md")
    assert len(path.name.split("-h200-")[0]) == len("2026-11-29")


# ---- floors, sets, checks -------------------------------------------------------------------------------------------


def test_floor_holds_each_part_of_the_traffic_against_its_own_rate() -> None:
    one = 8192 * 7168 * 2
    # Attention residual: ten reads and two writes of [8192, 7168] bf16.
    assert CEILINGS.floor_us(10 * one, 2 * one) == pytest.approx(8 * one / 4600e3 + 4 * one / 4280e3)
    state = 256 * 96 * 128 * 128 * 4
    assert CEILINGS.floor_us(state, state, in_place=True) == pytest.approx(2 * state / 4260e3)
    assert CEILINGS.floor_us(1.0, 0.0, flops=1.307e9, matmul="fp8") == pytest.approx(1.0)
    with pytest.raises(ValueError, match="matmul"):
        CEILINGS.floor_us(1.0, 0.0, matmul="fp16")


def test_number_of_sets() -> None:
    assert num_sets(3584) == 64  # tiny: as many as allowed, and the row is marked warm
    assert num_sets(100 << 20) == 4
    assert num_sets(10 << 30) == 2
    assert num_sets(0) == 2


def test_summary_of_runs_is_the_median() -> None:
    timing = summarise([3.0, 1.0, 2.0])
    assert (timing.us, timing.spread) == (2.0, 1.0)


def test_relative_error_never_passes_a_nan() -> None:
    want = torch.ones(4)
    assert relative_error(want, want) == 0.0
    assert relative_error(torch.tensor([1.0, 1.0, math.nan, 1.0]), want) == math.inf
    assert relative_error(want * 1.5, want) == pytest.approx(0.5)


def test_random_numbers_are_the_same_in_every_run() -> None:
    first, second = (Session(torch.device("cpu"), PeerKit(None)) for _ in range(2))
    assert torch.equal(first.randn(3, 5, key="x"), second.randn(3, 5, key="x"))
    assert not torch.equal(first.randn(3, 5, key="x"), second.randn(3, 5, key="y"))


def test_shared_things_are_made_once_and_released() -> None:
    session, made = Session(torch.device("cpu"), PeerKit(None)), []
    for _ in range(2):
        session.shared("weights", lambda: made.append(1))
    session.release()
    session.shared("weights", lambda: made.append(1))
    assert len(made) == 2


# ---- peers ----------------------------------------------------------------------------------------------------------


def test_without_a_kit_every_peer_is_missing(tmp_path: Path) -> None:
    for kit in (PeerKit(None), PeerKit(tmp_path)):
        assert not any(kit.packed.values())
        with pytest.raises(MissingPeerError) as caught:
            _ = kit.peers
        assert kit.is_missing(caught.value)
        assert not kit.is_missing(RuntimeError("boom"))


def test_kit_reports_what_is_packed(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "peers.py").touch()
    files = {"_C_stable_libtorch.abi3.so.xz": {}, "fla_core-0.6.0-py3-none-any.whl": {}}
    (tmp_path / "kit" / "manifest.json").write_text(json.dumps({"files": files}))
    kit = PeerKit(tmp_path)
    assert {name for name, there in kit.packed.items() if there} == {"vLLM kernels", "fla"}
    assert set(kit.packed) == set(FILES)
    assert "not packed: vLLM MoE and routing" in kit.describe()


# ---- the torch versions are what the checks stand on ----------------------------------------------------------------


def test_eager_topk_and_dispatch_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 1.0]])
    bias = torch.tensor([0.9, 0.0, 0.0, 0.0])
    ids, weights = eager.topk(logits, bias, 2)  # scores 0.5 0.881 0.269 0.731; with bias 0 and 1 lead
    chosen = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert chosen == pytest.approx({0: 0.5 / 1.380797, 1: 0.880797 / 1.380797})
    counts, offsets, order = eager.dispatch(torch.tensor([[2, 0], [2, 1]]), 4)
    assert (counts.tolist(), offsets.tolist(), order.tolist()) == ([1, 1, 2, 0], [0, 1, 2, 4, 4], [1, 3, 0, 2])


def test_eager_agrees_with_the_reference() -> None:
    from kimi_kernels import attn_res, norm

    g = torch.Generator().manual_seed(5)
    blocks, partial, delta = (torch.randn(*s, generator=g) for s in ((3, 5, 64), (5, 64), (5, 64)))
    weights = [torch.randn(64, generator=g) for _ in range(3)]
    for got, want in zip(
        eager.attn_res(blocks, partial, delta, *weights), attn_res.mix(blocks, partial, delta, *weights), strict=True
    ):
        assert relative_error(got, want) < 1e-5  # two orders of summation in fp32
    assert relative_error(eager.rms_norm(partial, weights[0]), norm.rms(partial, weights[0])) < 1e-6


@pytest.mark.parametrize("quantise", [eager.fp8_per_token_group, eager.mxfp8])
def test_eager_quantisation_is_within_one_rounding(quantise) -> None:
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(1))
    q, scale = quantise(x)
    group = 256 // scale.shape[1]
    factor = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale
    back = (q.float().unflatten(-1, (-1, group)) * factor.unsqueeze(-1)).flatten(-2)
    assert relative_error(back, x) < 4e-2  # E4M3 keeps 3 bits of mantissa
    assert ((back - x).abs() <= x.abs() / 16 + factor.repeat_interleave(group, -1) * 2**-9).all()


def test_modules_of_the_first_kernels_are_there() -> None:
    there = modules_there()
    assert {f"bench.kernels.bench_{f}" for f in ("routing", "attn_res", "norm", "quant", "finalize")} <= set(there)
