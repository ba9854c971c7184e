"""The Audit that users hold: an audit's record, with all that can be asked of it.

Made of the gradients of modules by `Audit.of`, which has every format judged, or of a file by
`Audit.from_plain`. Imports no torch.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gradilocks.errors import GradilocksError
from gradilocks.lab.audit.audit_text import as_text, describe_format, explain
from gradilocks.lab.audit.judging import Judgement, judge, prefer, shares_of
from gradilocks.lab.audit_record import (
    AuditRecord,
    Fate,
    FormatFinding,
    Histogram,
    ModuleGradients,
    Recommendation,
    Shares,
)
from gradilocks.lab.formats import Format, format_named

__all__ = ["Audit"]


@dataclass(frozen=True)
class Audit(AuditRecord):
    """Where a model's gradients lie, and what each format would lose of them.

    Made by `gradilocks.audit` and `gradilocks audit`; `str(audit)` says it in words and tables.
    """

    @classmethod
    def of(
        cls,
        modules: Sequence[ModuleGradients],
        *,
        steps: int,
        formats: Sequence[Format],
        precision: str = "float32",
        loss_scale: float = 1.0,
        lost_passes: tuple[int, int] = (0, 0),
    ) -> Audit:
        """Judges histograms.

        `lost_passes` says how many backward passes began from a loss that was NaN or Inf itself,
        and of how many.
        """
        judged = [judge(format, modules) for format in formats]
        chosen = prefer(judged)
        words = explain(
            judged,
            chosen,
            modules,
            precision=precision,
            loss_scale=loss_scale,
            lost_passes=lost_passes,
        )
        fates = [
            {
                each.format.name: Fate(
                    shares_of(module.together, each.format, 1.0),
                    shares_of(module.together, each.format, each.scale),
                )
                for each in judged
            }
            for module in modules
        ]
        return cls(
            steps=steps,
            precision=precision,
            loss_scale=loss_scale,
            modules=tuple(replace(m, fates=f) for m, f in zip(modules, fates, strict=True)),
            formats=tuple(map(_finding, judged)),
            recommendation=Recommendation(
                format="fp32" if chosen is None else chosen.format.name,
                scale=1.0 if chosen is None else chosen.scale,
                keep=() if chosen is None else chosen.keep,
                words=tuple(words),
            ),
            parameters=Histogram.total(module.parameters for module in modules),
            activations=Histogram.total(module.activations for module in modules),
        )

    @property
    def initial_scale(self) -> float:
        """The recommended scale: `GradientControl(..., scale=DynamicScale(init_scale=...))`."""
        return self.recommendation.scale

    def shares(self, format: Any, scale: float = 1.0, *, module: str | None = None) -> Shares:
        """What a format would do to the gradients at a scale.

        Args:
            format: a name of `gradilocks.lab.formats.FORMATS`, or a torch.dtype.
            scale: any positive number. Where it is no power of two, the borders of the format lie
                inside bins, and the shares are estimates.
            module: of this module alone; of all if it is None.
        """
        chosen = format_named(format)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"scale must be a number, got {type(scale).__name__}.")
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"scale must be positive and finite, got {scale}.")
        if module is None:
            return shares_of(self.parameters + self.activations, chosen, scale)
        seen = {each.name: each for each in self.modules}
        if module not in seen:
            near = difflib.get_close_matches(module, seen, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {len(seen)}, see .modules."
            raise ValueError(f"module must be one that was audited, got {module!r}. {hint}")
        return shares_of(seen[module].together, chosen, scale)

    def table(self, format: Any = None, scale: float | None = None) -> list[dict[str, Any]]:
        """A row a module, for `pandas.DataFrame` and the like.

        Args:
            format: as in `shares`; by default the recommended one.
            scale: by default the one that is recommended for the format.
        """
        chosen = format_named(self.recommendation.format if format is None else format)
        if scale is None:
            scale = next((f.scale for f in self.formats if f.format is chosen), 1.0)
        return [
            {
                "module": module.name,
                "type": module.kind,
                "values": module.together.values,
                "zeros": module.together.zeros,
                "nonfinite": module.together.nonfinite,
                "largest": module.together.largest,
                "smallest": module.together.smallest,
                **self.shares(chosen, scale, module=module.name).to_plain(),
            }
            for module in self.modules
        ]

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_plain()` as a JSON file; an audit that is there is replaced, nothing else.

        Raises:
            GradilocksError: something else is there, or the place cannot be written.
        """
        text = json.dumps(self.to_plain(), indent=1, allow_nan=False) + "\n"
        place = Path(path)
        try:
            if place.is_file() and not _is_audit(place):
                raise GradilocksError(
                    f"{path} is already there and is no audit; choose another name, or remove it "
                    "first."
                )
            place.write_text(text, encoding="utf-8")
        except OSError as error:
            raise GradilocksError(f"{path} cannot be written: {error.strerror}.") from error

    def save_picture(self, path: str | os.PathLike[str], *, title: str = "Audit") -> None:
        """Writes the histograms, with the formats' windows over them, as one HTML page."""
        from gradilocks.report import write_audit_page

        write_audit_page(Path(path), self, title=title)

    def __str__(self) -> str:
        return as_text(self)


def _finding(judged: Judgement) -> FormatFinding:
    """What is kept of a judgement: not the reasons, but the words for them."""
    kept: dict[str, Any] = {each.name: getattr(judged, each.name) for each in fields(FormatFinding)}
    return FormatFinding(**{**kept, "words": describe_format(judged)})


def _is_audit(path: Path) -> bool:
    try:
        held = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(held, dict) and held.get("kind") == "audit"
