"""Decode image files into arrays of pixels, in the same way for training and for prediction."""

from collections import Counter
from pathlib import Path

import numpy as np

from lockstep.errors import BadInput, brief, listed

ENDINGS = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
WHITE = 2**16 - 1  # the brightest value of a 16-bit image
FEW_LEVELS = 64  # of the 256 of 8 bits
REMARKS = {
    "transparent": "have transparent parts, which are laid over white",
    "frames": "hold several pages or frames, of which the first is taken",
    "dark": "have 16 bits, of which 8 are kept, and so fewer than 64 levels; scale them to the whole range if you need"
    " more",
    "blank": "are of one colour throughout",
}
NAMED = 3  # how many images a note names
# What may be opened, whatever a file's ending says. PIL would give PostScript to Ghostscript, which runs it.
FORMATS = ("PNG", "JPEG", "BMP", "DIB", "GIF", "TIFF", "WEBP", "PPM")
LOSSY = ("JPEG", "MPO", "WEBP")
ORIENTATION = 0x0112  # EXIF's tag; 1 is upright


class Remarks:
    """Collects remarks on decoded images by kind (REMARKS), with their number and the first names."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.first: dict[str, list[str]] = {}

    def add(self, kind: str, image: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= NAMED:
            self.first.setdefault(kind, []).append(image)

    def notes(self) -> list[str]:
        return [
            f"{self.counts[kind]} images {said} ({listed(self.first[kind])}{', ...' * (self.counts[kind] > NAMED)})"
            for kind, said in REMARKS.items()
            if self.counts[kind]
        ]


def decode_file(file: Path, size: int | None, channels: int) -> np.ndarray:
    """Decode an image file for prediction: uint8 [channels, height, width]. Raises BadInput."""
    return pixels(file, str(file), size, "L" if channels == 1 else "RGB")


def pixels(
    source,
    where: str,
    size: int | None,
    mode: str | None = None,
    remarks: Remarks | None = None,
    masked: bool = False,
) -> np.ndarray:
    """Decode an image with PIL: uint8 [channels, height, width], one channel if it is grey, otherwise RGB.

    Args:
        source: a file, a file object or a PIL image.
        where: the image's name in messages.
        size: if given, the image is resized to `size` x `size` pixels.
        mode: "L" or "RGB", to force the channels.
        masked: whether it has a mask; then it is refused if EXIF says that it is to be turned, since the mask may have
            been drawn before or after that.

    Transparent parts are laid over white. Raises BadInput.
    """
    from PIL import Image as Picture
    from PIL import ImageOps, UnidentifiedImageError

    remarks = Remarks() if remarks is None else remarks
    try:
        picture = source if isinstance(source, Picture.Image) else Picture.open(source, formats=FORMATS)
        if getattr(picture, "n_frames", 1) > 1:
            remarks.add("frames", where)
        in_16_bits = any(";16" in str(tile[3]) for tile in getattr(picture, "tile", ()))  # PIL reads colours in 8
        if masked and picture.getexif().get(ORIENTATION, 1) not in (0, 1):
            raise BadInput(
                f"{where}: EXIF says that it is to be turned, and nothing says whether its mask is of the turned image."
                " Save it upright, without EXIF (ImageMagick: mogrify -auto-orient -strip), and see that its mask fits."
            )
        picture = ImageOps.exif_transpose(picture)  # rotate it as the camera was held
        mode = mode or ("L" if picture.mode in ("1", "L", "LA") or picture.mode.startswith("I") else "RGB")
        if picture.mode.startswith("I"):  # 16 bits; PIL would clip the values instead of scaling them
            values = np.asarray(picture)
            if values.min() < 0 or values.max() > WHITE:
                raise ValueError(f"its values are from {values.min()} to {values.max()}, outside of 0 to {WHITE}")
            scaled = (values / 257).round().astype(np.uint8)
            levels = len(np.unique(scaled))
            if levels < FEW_LEVELS and levels < len(np.unique(values)):
                remarks.add("dark", where)
            picture = Picture.fromarray(scaled)
        if picture.mode == "F":  # PIL would truncate the values to integers
            raise ValueError("its pixels are floating-point numbers, so the value of white is unknown")
        if picture.has_transparency_data:  # PIL would show the colour of transparent pixels, usually black
            picture = picture.convert("RGBA")
            if picture.getextrema()[3][0] < 255:
                remarks.add("transparent", where)
            picture = Picture.alpha_composite(Picture.new("RGBA", picture.size, "white"), picture)
        picture = picture.convert(mode)
        if size:
            picture = picture.resize((size, size), Picture.Resampling.BILINEAR)
        decoded = np.asarray(picture, dtype=np.uint8)
    except FileNotFoundError:
        raise BadInput(f"{where}: is not a file. Name an existing one.") from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Picture.DecompressionBombError) as error:
        raise BadInput(f"{where}: can't be decoded as an image: {brief(error)}. Remove it, or save it anew.") from None
    if in_16_bits and decoded.ndim == 3 and len(np.unique(decoded)) < FEW_LEVELS:
        remarks.add("dark", where)
    if decoded.min() == decoded.max():
        remarks.add("blank", where)
    return decoded[None] if decoded.ndim == 2 else decoded.transpose(2, 0, 1)
