"""What an audit has found: the Audit that users hold, its parts, and both as plain data."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gradilocks.errors import BadRunFile, GradilocksError
from gradilocks.lab.audit.histogram import Histogram, Shares, shares_of
from gradilocks.lab.audit.judging import Judgement, judge, prefer
from gradilocks.lab.audit.modules import ModuleGradients, Outputs
from gradilocks.lab.audit.words import describe_format, explain
from gradilocks.lab.formats import Format, format_named

__all__ = [
    "Audit",
    "FormatFinding",
    "ModuleGradients",
    "Recommendation",
    "formats_named",
    "refuse_blocks",
]


@dataclass(frozen=True)
class FormatFinding:
    """What one format would do to the gradients."""

    format: Format
    scale: float
    """The initial scale to take for this format."""
    holds: bool
    """Whether the format holds them at that scale, without the modules in `keep`."""
    keep: tuple[str, ...]
    words: str
    unscaled: Shares
    """Of all values at scale 1."""
    scaled: Shares
    """Of all values at `scale`."""


@dataclass(frozen=True)
class Recommendation:
    """What to train with."""

    format: str
    """'fp16', 'bf16', ... or 'fp32'."""
    scale: float
    """For `DynamicScale(init_scale=)` or `StaticScale`; 1 if none is needed."""
    keep: tuple[str, ...]
    """Modules to keep in float32."""
    words: tuple[str, ...]
    """Why, in sentences."""


@dataclass(frozen=True)
class Audit:
    """Where a model's gradients lie, and what each format would lose of them.

    Made by `gradilocks.audit` and `gradilocks audit`; `str(audit)` says it in words and tables.
    """

    steps: int
    """Batches, or steps of an optimizer, that were seen."""
    precision: str
    """What the gradients were computed in, as in 'float32' or 'float16 autocast'."""
    loss_scale: float
    """The scale that was divided out of them; 1 without."""
    modules: tuple[ModuleGradients, ...]
    """In forward order."""
    formats: tuple[FormatFinding, ...]
    recommendation: Recommendation

    @classmethod
    def of(
        cls,
        modules: Sequence[ModuleGradients],
        *,
        steps: int,
        formats: Sequence[Format],
        precision: str = "float32",
        loss_scale: float = 1.0,
    ) -> Audit:
        """Judges histograms."""
        judged = [judge(format, modules) for format in formats]
        chosen = prefer(judged)
        words = explain(judged, chosen, modules, precision=precision, loss_scale=loss_scale)
        return cls(
            steps=steps,
            precision=precision,
            loss_scale=loss_scale,
            modules=tuple(modules),
            formats=tuple(_finding(each) for each in judged),
            recommendation=Recommendation(
                format="fp32" if chosen is None else chosen.format.name,
                scale=1.0 if chosen is None else chosen.scale,
                keep=() if chosen is None else chosen.keep,
                words=tuple(words),
            ),
        )

    @property
    def initial_scale(self) -> float:
        """The recommended scale: `GradientControl(..., scale=DynamicScale(init_scale=...))`."""
        return self.recommendation.scale

    @cached_property
    def parameters(self) -> Histogram:
        """The gradients of all parameters."""
        return Histogram.total(m.parameters for m in self.modules if m.parameters is not None)

    @cached_property
    def activations(self) -> Histogram:
        """The gradients of all modules' outputs."""
        return Histogram.total(m.activations for m in self.modules if m.activations is not None)

    def shares(self, format: Any, scale: float = 1.0, *, module: str | None = None) -> Shares:
        """What a format would do to the gradients at a scale.

        Args:
            format: a name of `gradilocks.lab.formats.FORMATS`, or a torch.dtype.
            scale: any positive number. Where it is no power of two, the borders of the format lie
                inside bins, and the shares are estimates.
            module: of this module alone; of all if it is None.
        """
        (chosen,) = formats_named([format], argument="format")
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"scale must be a number, got {type(scale).__name__}.")
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"scale must be positive and finite, got {scale}.")
        if module is None:
            return shares_of(self.parameters + self.activations, chosen, scale)
        return shares_of(self._module(module).together, chosen, scale)

    def table(self, format: Any = None, scale: float | None = None) -> list[dict[str, Any]]:
        """A row a module, for `pandas.DataFrame` and the like.

        Args:
            format: as in `shares`; by default the recommended one.
            scale: by default the one that is recommended for the format.
        """
        name = self.recommendation.format if format is None else format
        (chosen,) = formats_named([name], argument="format")
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
                **self.shares(chosen.name, scale, module=module.name).to_plain(),
            }
            for module in self.modules
        ]

    def to_plain(self) -> dict[str, Any]:
        """As a run file's audit line has it: dicts, lists, numbers and strings."""
        return {
            "kind": "audit",
            "version": 1,
            "steps": self.steps,
            "precision": self.precision,
            "loss_scale": self.loss_scale,
            "formats": [_plain_format(each) for each in self.formats],
            "recommendation": {
                "format": self.recommendation.format,
                "scale": self.recommendation.scale,
                "keep": list(self.recommendation.keep),
                "words": list(self.recommendation.words),
            },
            "modules": [self._plain_module(module) for module in self.modules],
            "total": {
                "parameters": self.parameters.to_plain(),
                "activations": self.activations.to_plain(),
            },
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Audit:
        """The audit of a run file or a JSON file: `Audit.from_plain(read_run(path).audit)`.

        Raises:
            BadRunFile: it is no audit, or one of another version.
        """
        given: object = plain
        if not isinstance(given, Mapping) or plain.get("kind") != "audit":
            raise BadRunFile(f"expected what Audit.to_plain() returns, got {_short(plain)}.")
        if plain.get("version") != 1:
            raise BadRunFile(
                f"an audit of version {plain.get('version')!r}; this gradilocks reads 1. Install "
                "the gradilocks that wrote it, or a newer one."
            )
        try:
            said = plain["recommendation"]
            return cls(
                steps=int(plain["steps"]),
                precision=str(plain["precision"]),
                loss_scale=float(plain["loss_scale"]),
                modules=tuple(_module_of(each) for each in plain["modules"]),
                formats=tuple(_format_of(each) for each in plain["formats"]),
                recommendation=Recommendation(
                    said["format"], said["scale"], tuple(said["keep"]), tuple(said["words"])
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadRunFile(f"an audit that is not as it must be: {error!r}.") from error

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

        write_audit_page(Path(path), self.to_plain(), title=title)

    def __str__(self) -> str:
        from gradilocks.lab.audit.text import as_text

        return as_text(self)

    def _module(self, name: str) -> ModuleGradients:
        for module in self.modules:
            if module.name == name:
                return module
        names = [module.name for module in self.modules]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are {len(names)}, see .modules."
        raise ValueError(f"module must be one that was audited, got {name!r}. {hint}")

    def _plain_module(self, module: ModuleGradients) -> dict[str, Any]:
        def plain(histogram: Histogram | None) -> dict[str, Any] | None:
            return None if histogram is None else histogram.to_plain()

        return {
            "name": module.name,
            "type": module.kind,
            "parameters": plain(module.parameters),
            "activations": plain(module.activations),
            "outputs": None if module.outputs is None else module.outputs.to_plain(),
            "fates": {
                each.format.name: {
                    "unscaled": shares_of(module.together, each.format, 1.0).to_plain(),
                    "scaled": shares_of(module.together, each.format, each.scale).to_plain(),
                }
                for each in self.formats
            },
        }


def formats_named(formats: Iterable[Any], *, argument: str = "formats") -> list[Format]:
    """Formats by name or dtype, each once.

    Raises:
        ValueError: there is none of a name, or no format at all.
    """
    if isinstance(formats, str) or not isinstance(formats, Iterable):
        formats = [formats]
    found = {each.name: each for each in map(_named, formats)}
    if not found:
        raise ValueError(f"{argument} must name at least one format, got none.")
    if argument == "formats":
        refuse_blocks(found)
    return list(found.values())


def refuse_blocks(names: Iterable[str]) -> None:
    """fp4 lives under a scale for every block, which one loss scale says nothing about."""
    if "fp4 e2m1" in names:
        raise ValueError(
            "fp4 is stored with a scale for every block of values, so what one loss scale would "
            "lose says nothing about it. Train under gradilocks.emulate('fp4') to find out."
        )


def _named(format: Any) -> Format:
    return format if isinstance(format, Format) else format_named(str(format))


def _finding(judged: Judgement) -> FormatFinding:
    return FormatFinding(
        format=judged.format,
        scale=judged.scale,
        holds=judged.holds,
        keep=judged.keep,
        words=describe_format(judged),
        unscaled=judged.unscaled,
        scaled=judged.scaled,
    )


def _plain_format(each: FormatFinding) -> dict[str, Any]:
    return {
        "name": each.format.name,
        "largest": each.format.largest,
        "smallest_normal": each.format.smallest_normal,
        "smallest_subnormal": each.format.smallest_subnormal,
        "scale": each.scale,
        "holds": each.holds,
        "keep": list(each.keep),
        "words": each.words,
        "unscaled": each.unscaled.to_plain(),
        "scaled": each.scaled.to_plain(),
    }


def _format_of(plain: Mapping[str, Any]) -> FormatFinding:
    return FormatFinding(
        format=format_named(plain["name"]),
        scale=plain["scale"],
        holds=plain["holds"],
        keep=tuple(plain["keep"]),
        words=plain["words"],
        unscaled=Shares(**plain["unscaled"]),
        scaled=Shares(**plain["scaled"]),
    )


def _module_of(plain: Mapping[str, Any]) -> ModuleGradients:
    parts = (plain["parameters"], plain["activations"])
    parameters, activations = (None if p is None else Histogram.from_plain(p) for p in parts)
    outputs = plain.get("outputs")  # Not in the first audits.
    return ModuleGradients(
        plain["name"],
        plain["type"],
        parameters,
        activations,
        None if outputs is None else Outputs.from_plain(outputs),
    )


def _is_audit(path: Path) -> bool:
    try:
        held = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(held, dict) and held.get("kind") == "audit"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
