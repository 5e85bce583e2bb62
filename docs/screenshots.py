"""Makes the pictures in ``docs/images`` anew: a real run on a real terminal, and its report.

``.venv/bin/python docs/screenshots.py`` runs the main job on a pty of 100 columns and 30 rows,
kills a rollout worker on the way, draws the screen as it stands some steps later, and takes the
``report.png`` of the run's end. It takes as long as the job, a minute or two.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import matplotlib
import psutil
import pyte
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests" / "launch" / "board"))

from pty_screen import OnPty  # noqa: E402 - a tests' file, found only now

COLUMNS, ROWS = 100, 30
KILL_AT, SHOT_AT = 110, 170
"""Steps at which a worker is killed and the screen is drawn."""
DEADLINE = 600.0
SIZE = 15
"""Of the font, pixels."""
MARGIN = 12
GROUND, INK = "#16181d", "#d7dae0"
COLOURS = {
    "default": INK,
    "black": "#3b4048",
    "red": "#ef6b73",
    "green": "#8cc265",
    "brown": "#e5b567",
    "blue": "#4aa5f0",
    "magenta": "#c678dd",
    "cyan": "#42b3c2",
    "white": INK,
}
"""pyte calls yellow brown."""
DIM = "868c98"


def picture(screen: pyte.Screen) -> Image.Image:
    """A terminal's screen."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = {
        False: ImageFont.truetype(str(folder / "DejaVuSansMono.ttf"), SIZE),
        True: ImageFont.truetype(str(folder / "DejaVuSansMono-Bold.ttf"), SIZE),
    }
    wide = round(fonts[False].getlength("m"))
    high = sum(fonts[False].getmetrics())
    # The empty rows below would only take the reader's room.
    rows = screen.cursor.y + 1
    size = (screen.columns * wide + 2 * MARGIN, rows * high + 2 * MARGIN)
    image = Image.new("RGB", size, GROUND)
    pen = ImageDraw.Draw(image)
    for row in range(rows):
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            if cell.data == " ":
                continue
            colour = COLOURS.get(cell.fg, f"#{cell.fg}")
            place = (MARGIN + column * wide, MARGIN + row * high)
            pen.text(place, cell.data, font=fonts[cell.bold], fill=colour)
    return image


class DimScreen(pyte.Screen):
    """pyte knows no dim text: it is remembered here as a colour of its own."""

    def select_graphic_rendition(self, *attributes: int, **more: object) -> None:
        """2 is dim; every piece of ours ends in a reset."""
        super().select_graphic_rendition(*attributes, **more)
        if 2 in attributes:
            self.cursor.attrs = self.cursor.attrs._replace(fg=DIM)


def step_of(text: str) -> int:
    """The step that the view shows."""
    found = re.search(r"^ step +([\d,]+)/", text, re.MULTILINE)
    return int(found[1].replace(",", "")) if found else 0


def main() -> int:
    """Runs, watches, draws."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tandem-screenshots-") as place:
        command = [sys.executable, "-P", "-m", "tandem.launch.cli", "start", "miniature"]
        view = OnPty(command, columns=COLUMNS, rows=ROWS, cwd=place, screen=DimScreen)
        try:
            view.await_text(lambda told: step_of(told) >= KILL_AT, DEADLINE)
            for child in psutil.Process(view.process.pid).children():
                if "rollout-0" in child.cmdline():
                    child.send_signal(signal.SIGKILL)
            view.await_text(lambda told: step_of(told) >= SHOT_AT, DEADLINE)
            with view.still() as screen:
                picture(screen).save(IMAGES / "live-view.png", optimize=True)
            code = view.wait(DEADLINE)
            print(view.text())
            if code == 0:
                report = Path(place) / "runs" / "miniature" / "report.png"
                shutil.copyfile(report, IMAGES / "report.png")
            return code
        finally:
            view.end()


if __name__ == "__main__":
    sys.exit(main())
