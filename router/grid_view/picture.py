"""Scenes as SVG and PNG files, drawn by matplotlib: an extra, so it is imported when a file is made."""

import warnings
from pathlib import Path
from typing import Any

from slagate.router.grid_view.scene import Arrow, Box, Label, Line, Scene, Shape
from slagate.workers.runtime.errors import UsageError

DPI = 150
_FRAME = "#c00000"

# Text stays text in SVG, where it can be searched; and the same scene gives the same bytes, wherever.
_FONT = "DejaVu Sans"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "slagate",
    "font.family": [_FONT],
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
    "hatch.color": "#ffffff",
}


def missing_glyphs(scene: Scene) -> str:
    """Characters of `scene` that the font of PNG files lacks, each once.

    Raises `UsageError` without matplotlib.
    """
    need_matplotlib()
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    used = {char for shape in scene.shapes if isinstance(shape, Label) for char in shape.text}
    missing: set[str] = set()
    for weight in ("normal", "bold"):
        font = findfont(FontProperties(family=_FONT, weight=weight))
        known = FT2Font(font).get_charmap()
        missing |= {char for char in used if ord(char) not in known}
    return "".join(sorted(missing))


def write_picture(scene: Scene, path: Path, *, kind: str) -> None:
    """Draw `scene` into the file at `path`; `kind` is svg or png.

    Raises `UsageError` without matplotlib, and for a file that cannot be written.
    """
    need_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        # Not what a file of the user's makes of it.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # In SVG files text stays text, for whichever font shows it.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=(scene.width / 72, scene.height / 72), dpi=DPI, facecolor="white")
        axes: Any = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
        axes.set_axis_off()
        for shape in scene.shapes:
            _draw(axes, shape)
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        try:
            figure.savefig(path, format=kind, dpi=DPI, metadata=metadata)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def need_matplotlib() -> None:
    """Raise `UsageError` where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"pictures need the extra plots: pip install 'slagate[plots]' (for matplotlib: {error})"
        ) from error


def _draw(axes: Any, shape: Shape) -> None:
    from matplotlib.patches import Polygon

    if isinstance(shape, Line):
        axes.plot([shape.x, shape.to_x], [shape.y, shape.to_y], color="black", linewidth=0.6)
    elif isinstance(shape, Arrow):
        dx, dy = (3.5, -5.0) if shape.down else (5.0, 3.5)
        corners = [(shape.x, shape.y), (shape.x + dx, shape.y + dy)]
        corners.append((shape.x - dx, shape.y + dy) if shape.down else (shape.x + dx, shape.y - dy))
        axes.add_patch(Polygon(corners, facecolor="black", linewidth=0))
    elif isinstance(shape, Label):
        axes.text(
            shape.x,
            shape.y,
            shape.text,
            fontsize=shape.size,
            color=shape.ink,
            fontweight="bold" if shape.bold else "normal",
            rotation=90 if shape.turned else 0,
            **_alignment(shape),
        )
    else:
        _draw_box(axes, shape)


def _draw_box(axes: Any, box: Box) -> None:
    from matplotlib.patches import Rectangle

    def rectangle(inset: float, **style: Any) -> None:
        size = (box.width - 2 * inset, box.height - 2 * inset)
        axes.add_patch(Rectangle((box.x + inset, box.y + inset), *size, **style))

    hatch = "/////" if box.hatched else None
    rectangle(0.0, facecolor=box.fill, edgecolor="white", linewidth=0.8, hatch=hatch)
    if box.hatched:
        # Plain where text is.
        rectangle(0.16 * min(box.width, box.height), facecolor=box.fill, linewidth=0)
    if box.frame:
        # White under the red keeps the two apart where the fill is close to it.
        for colour, width in (("white", 4.0), (_FRAME, 2.2)):
            rectangle(2.0, fill=False, edgecolor=colour, linewidth=width)


def _alignment(label: Label) -> dict[str, str]:
    if label.turned:
        # Upwards, the end of the text is its top.
        vertical = {"left": "bottom", "center": "center", "right": "top"}[label.align]
        return {"ha": "center", "va": vertical}
    return {"ha": label.align, "va": "center_baseline"}
