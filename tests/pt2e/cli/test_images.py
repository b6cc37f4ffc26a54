import numpy as np
import pytest

from pt2mx import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.images import read_image


@pytest.mark.parametrize(
    ("mode", "colour", "asked", "want"),
    [
        ("L", 7, "RGB", (7, 7, 7)),
        ("RGBA", (1, 2, 3, 255), "RGB", (1, 2, 3)),
        ("RGB", (9, 9, 9), "L", 9),
    ],
)
def test_channels(mode, colour, asked, want, tmp_path):
    import_extra("PIL.Image", "vision").new(mode, (3, 2), colour).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png", asked)
    assert image.size == (3, 2) and image.getpixel((2, 1)) == want


def test_a_photo_taken_upright_is_upright(tmp_path):
    photo = import_extra("PIL.Image", "vision").new("RGB", (8, 4))
    turned = photo.getexif()
    turned[0x0112] = 6  # the tag of orientation: a quarter turn
    photo.save(tmp_path / "a.jpg", exif=turned)
    assert read_image(tmp_path / "a.jpg").size == (4, 8)


def test_no_image(tmp_path):
    (tmp_path / "a.png").write_text("no")
    with pytest.raises(MXError, match=r"a\.png' is no image: UnidentifiedImageError"):
        read_image(tmp_path / "a.png")


def test_sixteen_bits_are_scaled(tmp_path):
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    import_extra("PIL.Image", "vision").fromarray(ramp).save(tmp_path / "ramp.png")
    assert np.abs(np.asarray(read_image(tmp_path / "ramp.png", "L")).reshape(-1) - np.arange(256.0)).max() <= 1
