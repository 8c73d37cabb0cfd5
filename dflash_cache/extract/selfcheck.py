"""Before the first shard is sealed: does what was stored agree with the target itself?

Sampled documents of the staged shard are run again, alone and unpadded, through the whole target with its lm_head:

1. Every stored plane agrees with what enters the *next* module (layer i + 1, or the final norm): another way to the
   same numbers than the hooks that captured them. It agrees with no neighbouring layer more.
2. ``final_norm(last hidden states)`` from the stored bytes, with the norm that travels with the cache, is what the
   target's own norm gives, and the argmax of lm_head over it is the target's own argmax.
3. Every stored row is finite and not all zero, and no two planes are equal.

Shapes: n tokens of a document, m compared positions, P planes, H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_cache.errors import NonFiniteError, SelfCheckError
from dflash_cache.extract.agreement import PlaneDifference, Tolerance, compare_plane, nearer_layer, tolerance_for
from dflash_cache.extract.alone import OwnStates, run_alone
from dflash_cache.extract.features import plane_layers, plane_name
from dflash_cache.extract.head import FoundHead
from dflash_cache.extract.loading import LoadedTarget
from dflash_cache.format.shard import ShardReader
from dflash_cache.spec import FeatureSpec
from dflash_cache.target_head import TargetHead

__all__ = ["PlaneError", "SelfCheckReport", "run_self_check", "spread_over_lengths"]

MIN_AGREEMENT = 0.999
_HEAD_ROWS = 64
# A bfloat16 keeps 8 significant bits: half a step is 2^-9 of the value, a whole one 2^-8.
_BF16_STEP = 2.0**-8


@dataclass(frozen=True)
class PlaneError:
    """How far a stored plane is from the target, over all documents checked.

    Attributes:
      name: What it is.
      layer: Its layer.
      error, row_error: Of the plane and of its worst token, as :class:`PlaneDifference` has them.
      astray: Tokens that went another way, through other experts; they are no part of error.
    """

    name: str
    layer: int
    error: float
    row_error: float
    astray: int


@dataclass(frozen=True)
class SelfCheckReport:
    """What was checked and how well it agreed.

    Attributes:
      doc_ids: The documents, by their index in the corpus.
      planes: One entry a plane.
      tolerance, row_tolerance: What errors and row errors may be.
      positions: Token positions whose argmax was computed both ways.
      decisive: Those whose best two logits are farther apart than rounding.
      agreement: Share of the decisive positions with equal argmax.
    """

    doc_ids: tuple[int, ...]
    planes: tuple[PlaneError, ...]
    tolerance: float
    row_tolerance: float
    positions: int
    decisive: int
    agreement: float

    @property
    def worst(self) -> PlaneError:
        """The plane with the largest error."""
        return max(self.planes, key=lambda plane: plane.error)


def spread_over_lengths(lengths: Sequence[int] | npt.NDArray[Any], count: int) -> list[int]:
    """Choose documents from the shortest to the longest, evenly by rank.

    Returns:
      At most count different places in lengths, ascending.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    ranks = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(np.int64)
    return sorted({int(order[rank]) for rank in ranks})


@torch.inference_mode()
def run_self_check(
    target: LoadedTarget, found: FoundHead, features: FeatureSpec, reader: ShardReader, num_documents: int
) -> SelfCheckReport:
    """Check a staged shard.

    Args:
      target: The target.
      found: The head that will travel with the cache.
      features: What was stored.
      reader: The staged shard.
      num_documents: How many of its documents are recomputed.

    Raises:
      SelfCheckError: Naming document, layer, error and tolerance.
      NonFiniteError: If a stored number is not finite.
    """
    starts = np.cumsum(reader.doc_lengths, dtype=np.int64) - reader.doc_lengths
    chosen = spread_over_lengths(reader.doc_lengths, num_documents)
    differences: list[list[PlaneDifference]] = []
    tolerance = tolerance_for(target)
    positions = decisive = agreeing = 0
    for place in chosen:
        doc_id = int(reader.doc_ids[place])
        rows = (int(starts[place]), int(starts[place] + reader.doc_lengths[place]))
        stored_nPH = _read_planes(reader, rows, target.device)
        _check_rows(stored_nPH, features, doc_id)
        input_ids = torch.from_numpy(reader.arrays["input_ids"].read(*rows).astype(np.int64)).to(target.device)
        own = run_alone(target, found.final_norm, features, input_ids)
        found_here = [
            compare_plane(stored_nPH[:, p].float(), plane_nH, tolerance) for p, plane_nH in enumerate(own.planes)
        ]
        _require_agreement(target, features, found_here, doc_id)
        _require_layers(target, features, stored_nPH, own, doc_id)
        _require_norm(target, _compare_norm(found, stored_nPH[:, -1], own, found_here[-1], tolerance), doc_id)
        differences.append(found_here)
        counted = _compare_argmax(target, found.head, stored_nPH[own.positions, -1], own)
        positions, decisive, agreeing = positions + len(own.positions), decisive + counted[0], agreeing + counted[1]
    _require_argmax(target, decisive, agreeing, positions)
    return SelfCheckReport(
        doc_ids=tuple(int(reader.doc_ids[place]) for place in chosen),
        planes=tuple(
            _summary(plane_name(features, p), layer, [found_here[p] for found_here in differences])
            for p, layer in enumerate(plane_layers(features))
        ),
        tolerance=tolerance.plane,
        row_tolerance=tolerance.row,
        positions=positions,
        decisive=decisive,
        agreement=agreeing / decisive,
    )


def _read_planes(reader: ShardReader, rows: tuple[int, int], device: torch.device) -> Tensor:
    fc_nLH = reader.arrays["fc_features"].read(*rows)
    last_nH = reader.arrays["last_hidden_states"].read(*rows)
    bits = np.concatenate([fc_nLH, last_nH[:, None]], axis=1)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(device)


def _check_rows(stored_nPH: Tensor, features: FeatureSpec, doc_id: int) -> None:
    layers = plane_layers(features)
    for plane in range(len(layers)):
        rows_nH = stored_nPH[:, plane]
        if not torch.isfinite(rows_nH).all():
            raise NonFiniteError(
                f"document {doc_id}: the {plane_name(features, plane)} are stored with NaN or infinity"
            )
        if not (rows_nH != 0).any(dim=-1).all():
            raise SelfCheckError(f"document {doc_id}: the {plane_name(features, plane)} have rows of zeros")
        for other in range(plane):
            if layers[other] != layers[plane] and torch.equal(rows_nH, stored_nPH[:, other]):
                raise SelfCheckError(
                    f"document {doc_id}: the {plane_name(features, plane)} equal the {plane_name(features, other)}; "
                    "one layer was captured twice"
                )


def _summary(name: str, layer: int, documents: list[PlaneDifference]) -> PlaneError:
    return PlaneError(
        name,
        layer,
        error=max(document.error for document in documents),
        row_error=max(document.row_error for document in documents),
        astray=sum(len(document.astray) for document in documents),
    )


def _require_agreement(
    target: LoadedTarget, features: FeatureSpec, differences: list[PlaneDifference], doc_id: int
) -> None:
    tolerance = tolerance_for(target)
    for plane, difference in enumerate(differences):
        if difference.within(tolerance):
            continue
        raise SelfCheckError(
            f"document {doc_id}: the stored {plane_name(features, plane)} are not what {target.name} computes for this "
            f"document alone: relative error {difference.error:.3g} (tolerance {tolerance.plane}), worst token "
            f"{difference.row_error:.3g} (tolerance {tolerance.row}), tokens beyond it {len(difference.astray)}, of "
            f"which {difference.unrecognised} are not explained by another choice of experts. Nothing was sealed. Try "
            "--attention eager and a smaller --batch-tokens; if it stays, this target does not run correctly in padded "
            "batches here"
        )


def _require_layers(
    target: LoadedTarget, features: FeatureSpec, stored_nPH: Tensor, own: OwnStates, doc_id: int
) -> None:
    for plane, neighbours in enumerate(own.neighbours):
        stored_mH = stored_nPH[own.positions, plane].float()
        nearer = nearer_layer(stored_mH, own.planes[plane][own.positions], neighbours)
        if nearer is not None:
            what = "the embedded tokens" if nearer < 0 else f"the output of layer {nearer}"
            raise SelfCheckError(
                f"document {doc_id}: the stored {plane_name(features, plane)} are nearer to {what} of {target.name}. "
                "Nothing was sealed: the layers were captured one off; please report this target"
            )


def _compare_norm(
    found: FoundHead, stored_nH: Tensor, own: OwnStates, last: PlaneDifference, tolerance: Tolerance
) -> PlaneDifference:
    """Compare the final norm of the stored rows with the target's own, where the rows themselves agree."""
    keep = torch.ones(len(stored_nH), dtype=torch.bool, device=stored_nH.device)
    keep[last.astray] = False
    return compare_plane(found.head.final_norm(stored_nH[keep]).float(), own.normed[keep], tolerance)


def _require_norm(target: LoadedTarget, difference: PlaneDifference, doc_id: int) -> None:
    tolerance = tolerance_for(target)
    if difference.within(tolerance):
        return
    raise SelfCheckError(
        f"document {doc_id}: the final norm of the stored last hidden states (layer {len(target.layers) - 1}) is not "
        f"what {target.name} computes: relative error {difference.error:.3g} (tolerance {tolerance.plane}), worst "
        f"token {difference.row_error:.3g} (tolerance {tolerance.row}). Nothing was sealed: the norm was applied twice "
        "or is of another kind than it was taken for; please report this target"
    )


def _compare_argmax(target: LoadedTarget, head: TargetHead, stored_mH: Tensor, own: OwnStates) -> tuple[int, int]:
    """Compare the argmax from stored states with the target's own.

    Only decisive positions count: those where the best two logits are farther apart than what the stored rounding, and
    the rounding of the norm and the logits themselves, can move them.

    Returns:
      Decisive positions, and those of them that agree.
    """
    decisive = agreeing = 0
    exact = target.compute_dtype == torch.float32
    for start in range(0, len(stored_mH), _HEAD_ROWS):
        rows = slice(start, start + _HEAD_ROWS)
        dtype = head.lm_head_weight.dtype
        own_last = own.planes[-1][own.positions[rows]]
        stored_logits = head.logits(stored_mH[rows].to(dtype)).float()
        reference = head.logits(own_last.to(dtype)).float()
        own_logits = own.logits[rows].float()
        best, second = (reference.topk(2, dim=-1).values[:, i] for i in range(2))
        noise = 2 * (stored_logits - reference).abs().amax(dim=-1)
        # own_last itself was rounded to bfloat16, as the stored states were.
        top = reference.topk(2, dim=-1).indices
        direction = (head.lm_head_weight[top[:, 0]] - head.lm_head_weight[top[:, 1]]).float()
        roundings = 1 if exact else 2
        noise = noise + 6 * roundings * _BF16_STEP / 2 * (direction * head.final_norm(own_last).float()).norm(dim=-1)
        clear = best - second > noise
        if not exact:
            own_best, own_second = (own_logits.topk(2, dim=-1).values[:, i] for i in range(2))
            clear &= (own_best - own_second > 2 * _BF16_STEP * own_best.abs()) & (
                best - second > noise + 2 * _BF16_STEP * best.abs()
            )
        decisive += int(clear.sum())
        agreeing += int((clear & (stored_logits.argmax(dim=-1) == own_logits.argmax(dim=-1))).sum())
    return decisive, agreeing


def _require_argmax(target: LoadedTarget, decisive: int, agreeing: int, positions: int) -> None:
    if decisive == 0:
        raise SelfCheckError(
            f"{target.name}: none of {positions} positions has a clear best token, so the last layer and the final "
            "norm cannot be verified; use a corpus of text that the target knows, or more --self-check-documents"
        )
    if agreeing < MIN_AGREEMENT * decisive:
        raise SelfCheckError(
            f"lm_head(final_norm(last hidden states)) from the stored bytes has the argmax of {target.name} on "
            f"{agreeing} of {decisive} clear positions ({agreeing / decisive:.2%}, expected at least "
            f"{MIN_AGREEMENT:.1%}). Nothing was sealed: layer {len(target.layers) - 1}, the final norm or lm_head is "
            "not what it was taken for; please report this target"
        )
