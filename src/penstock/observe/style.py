"""How the pictures look: one palette (colour-blind safe, after Okabe and Ito), quiet axes."""

from __future__ import annotations

from typing import Any

INK, GREY, PALE = "#222831", "#c9ced6", "#f3f4f6"
BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, RED = (
    "#0072b2",
    "#e07b00",
    "#009e73",
    "#aa5fa0",
    "#56b4e9",
    "#f0c808",
    "#c1123f",
)

STYLE: dict[str, Any] = {
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
