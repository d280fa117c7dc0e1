"""What corrects for the engine, in float64 and sample by sample: a part of ``reference``.

``d`` are the trainer's less the engine's log-probs of a sample's tokens, [R] float64, ``mask`` its loss mask.
"""

from argparse import Namespace
from dataclasses import dataclass

import torch

Vector = torch.Tensor
ICEPOP = "slime.training.losses.corrections.icepop_function"
TIS = "slime.training.losses.corrections.vanilla_tis_function"
MIS = "slime.training.losses.mis.mis_function"


@dataclass
class Correction:
    """What a correction makes of a sample: factors of the objective, where it is kept, and metrics, [R]."""

    factor: Vector
    kept: Vector
    report: dict[str, Vector]


def correct(
    args: Namespace, train: Vector, engine: Vector, mask: Vector, mean: float, margins: list[float]
) -> Correction:
    """Args: ``mean`` is that of `mean_weight`."""
    if args.tis_function_path == MIS:
        return _mis(args, train, engine, mask, mean, margins)
    weight = (train - engine).exp()
    for bound in (args.tis_clip_low, args.tis_clip):
        margins += (weight - bound).abs()[mask == 1].tolist()
    if args.tis_function_path == ICEPOP:
        used = weight * ((weight >= args.tis_clip_low) & (weight <= args.tis_clip))
    else:
        used = weight.clamp(args.tis_clip_low, args.tis_clip)
    report = {"tis": weight, "tis_abs": (weight - 1).abs(), "tis_clipfrac": (used != weight).double()}
    return Correction(used, torch.ones_like(weight, dtype=torch.bool), report)


def mean_weight(args: Namespace, samples: list[tuple[Vector, Vector]]) -> float:
    """Averages the (d, mask) of a step: over trained tokens, or over sequences that have any."""
    weights: list[float] = []
    for d, mask in samples:
        used = _used(args, _weight(d, mask, args.tis_level))[mask == 1].tolist()
        weights += used if args.tis_level == "token" else used[:1]
    return sum(weights) / len(weights) if weights and sum(weights) else 1.0


def _weight(d: Vector, mask: Vector, level: str) -> Vector:
    if level == "token":
        return d.exp()
    product = d[mask == 1].exp().prod()
    if level == "geometric":
        product = product ** (1 / max(float(mask.sum()), 1))
    return product.expand(len(d))


def _used(args: Namespace, weight: Vector) -> Vector:
    if args.tis_mode == "mask":
        return torch.tensor(
            [w if args.tis_lower_bound <= w <= args.tis_upper_bound else 0.0 for w in weight],
            dtype=torch.float64,
        )
    least = args.tis_lower_bound if args.tis_mode == "clip" else 0.0
    return torch.tensor(
        [min(max(float(w), least), args.tis_upper_bound) for w in weight], dtype=torch.float64
    )


def _mis(
    args: Namespace, train: Vector, engine: Vector, mask: Vector, mean: float, margins: list[float]
) -> Correction:
    d, trained = train - engine, mask == 1
    weight = _weight(d, mask, args.tis_level)
    for bound in (args.tis_lower_bound, args.tis_upper_bound):
        margins += (weight - bound).abs()[trained].tolist()
    used = _used(args, weight) / (mean if args.tis_batch_normalize else 1.0)
    outside = (weight < args.tis_lower_bound) | (weight > args.tis_upper_bound)
    kept = ~outside if args.tis_mode == "mask" else torch.ones_like(trained)
    report = _gap(train, engine, trained) | {
        "tis_weight_before_bound": weight,
        "tis_weight_after_bound": used,
        "tis_above_fraction": (weight > args.tis_upper_bound).double(),
        "tis_below_fraction": (weight < args.tis_lower_bound).double(),
    }
    if args.use_rs:
        judged = _weight(d, mask, args.rs_level)
        for bound in (args.rs_lower_bound, args.rs_upper_bound):
            margins += (judged - bound).abs()[trained].tolist()
        kept = kept & (args.rs_lower_bound <= judged) & (judged <= args.rs_upper_bound)
        if args.rs_veto_threshold is not None:
            margins += (d.exp() - args.rs_veto_threshold).abs()[trained].tolist()
            vetoed = any(float(x.exp()) < args.rs_veto_threshold for x in d[trained])
            kept = kept & (not vetoed)
            report["veto_fraction"] = torch.full_like(d, float(vetoed))
    report["masked_fraction"] = (~kept).double()
    return Correction(used, kept, {f"mis_{name}": value for name, value in report.items()})


def _gap(train: Vector, engine: Vector, trained: Vector) -> dict[str, Vector]:
    def ppl(log_probs: Vector) -> Vector:
        values = log_probs[trained]
        return (-values.mean() if len(values) else torch.zeros(()).double()).exp().expand(len(log_probs))

    mine, theirs = ppl(train), ppl(engine)
    return {
        "kl": engine - train,
        "k3_kl": train.exp() / engine.exp() - 1 - (train - engine),
        "training_ppl": mine,
        "training_log_ppl": mine.log(),
        "rollout_ppl": theirs,
        "rollout_log_ppl": theirs.log(),
        "log_ppl_diff": (theirs / mine).log(),
        "log_ppl_abs_diff": (theirs / mine).log().abs(),
        "ppl_ratio": mine / theirs,
    }
