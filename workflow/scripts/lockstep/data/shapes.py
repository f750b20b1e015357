"""Generate pictures of shapes with known masks: segmentation data without a download.

Circles, squares and triangles of random size and rotation overlap on a striped background with noise. Colour is a weak
sign of a shape's class. A band around each outline has no class, as in masks that people draw.
"""

from collections.abc import Iterator

import numpy as np

IGNORED = 255  # the number of "no class" in a mask (PASCAL VOC, Everingham et al. 2010)
NAMES = ["background", "circle", "square", "triangle"]
COUNT, SIZE = 480, 32  # defaults: the number of pictures, and their height and width in pixels
BAND, EDGE = 0.6, 1.0  # half the width in pixels of the band without a class, and of the outline to be predicted
HUES = {1: (0.75, 0.45, 0.35), 2: (0.40, 0.65, 0.40), 3: (0.40, 0.45, 0.75)}  # RGB from 0 to 1
JITTER, NOISE = 0.16, 0.07  # standard deviations of a shape's colour, and of each pixel's noise

Shapes = Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]


def generate(count: int, size: int, seed: int) -> Shapes:
    """Yield each picture's name, pixels, uint8 [3, size, size], mask and outlines, uint8 [size, size].

    The mask holds positions in NAMES, or IGNORED; outlines are 1, all other pixels 0.
    """
    for number in range(count):
        yield (f"shapes {number}", *_picture(size, np.random.default_rng([seed, number])))


def _picture(size: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, columns = np.mgrid[:size, :size] + 0.5
    turn, wave = random.uniform(0, np.pi), random.uniform(0.5, 1.2)
    stripes = np.sin(wave * (rows * np.sin(turn) + columns * np.cos(turn)) + random.uniform(0, 2 * np.pi))
    colours = random.normal(0.5, 0.12, 3)[:, None, None] + 0.12 * stripes
    mask, outlines = np.zeros((size, size), np.uint8), np.zeros((size, size), np.uint8)
    for kind in random.integers(1, len(NAMES), random.integers(1, 4)):
        radius = size * random.uniform(0.14, 0.26)
        centre = random.uniform(radius * 0.8, size - radius * 0.8, 2)
        distance = _distance(kind, rows - centre[0], columns - centre[1], radius, random.uniform(0, 2 * np.pi))
        inside = distance < 0
        colour = random.normal(HUES[int(kind)], JITTER)
        colours = np.where(inside, colour[:, None, None], colours)
        mask[inside], outlines[inside] = kind, 0
        mask[np.abs(distance) < BAND], outlines[np.abs(distance) < EDGE] = IGNORED, 1
    pixels = 255 * (colours + random.normal(0, NOISE, colours.shape))
    return pixels.clip(0, 255).round().astype(np.uint8), mask, outlines


def _distance(kind: int, down: np.ndarray, right: np.ndarray, radius: float, turn: float) -> np.ndarray:
    """The signed distance of each pixel to a shape's outline, in pixels, negative inside: [height, width]."""
    if NAMES[kind] == "circle":
        return np.hypot(down, right) - radius
    sides = 4 if NAMES[kind] == "square" else 3
    angles = turn + 2 * np.pi * np.arange(sides) / sides
    # `reach` is the distance of the sides from the centre; the corners are farther away.
    reach = radius * (0.88 if sides == 4 else 0.70)
    return np.max([down * np.sin(angle) + right * np.cos(angle) - reach for angle in angles], axis=0)
