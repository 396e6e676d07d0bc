"""Draw the diagrams of the docs as SVG: boxes, arrows and text at places that this script names.

python docs/diagrams.py
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
INK, LINE = "#1b1b1b", "#5f6b73"
STEP, DATA, ENGINE, TRAINER, WARN = "#dcebf7", "#f4f4f4", "#fdebc8", "#d9f0e3", "#f9ddd5"
FONT = "font-family='Helvetica, Arial, sans-serif'"
Point = tuple[float, float]


class Drawing:
    """Shapes on a white page."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str, fill: str = STEP, size: int = 14) -> None:
        """A rectangle around (x, y) with centred lines of text; the first one is bold."""
        left, top = x - width / 2, y - height / 2
        self.parts.append(
            f"<rect x='{left}' y='{top}' width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{LINE}'/>"
        )
        lines = text.split("\n")
        for number, line in enumerate(lines):
            self.text(x, y + (number - (len(lines) - 1) / 2) * size * 1.25, line, size, bold=number == 0)

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "middle", bold: bool = False) -> None:
        weight = " font-weight='bold'" if bold else ""
        self.parts.append(
            f"<text x='{x}' y='{y + size * 0.35:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{INK}'{weight}>"
            f"{escape(text)}</text>"
        )

    def arrow(self, points: Sequence[Point], label: str = "", at: Point | None = None, dashed: bool = False) -> None:
        """A line through points with a head at its end."""
        path = " ".join(f"{'M' if number == 0 else 'L'}{x},{y}" for number, (x, y) in enumerate(points))
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<path d='{path}' fill='none' stroke='{LINE}' stroke-width='1.6' marker-end='url(#head)'{dash}/>"
        )
        if label:
            x, y = at or ((points[0][0] + points[1][0]) / 2, (points[0][1] + points[1][1]) / 2 - 9)
            self.text(x, y, label, 11)

    def write(self, name: str, title: str) -> None:
        head = (
            "<marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
            f"<path d='M0,0 L10,5 L0,10 z' fill='{LINE}'/></marker>"
        )
        body = "\n".join(self.parts)
        (IMAGES / f"{name}.svg").write_text(
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
            f"width='{self.width}' height='{self.height}' role='img' {FONT}>\n<title>{escape(title)}</title>\n"
            f"<defs>{head}</defs>\n<rect width='100%' height='100%' fill='white'/>\n{body}\n</svg>\n"
        )


def main() -> None:
    iteration()
    completion()
    modules()
    step()
    sync()
    exactness()
    precision()


def iteration() -> None:
    """The steps of `configs/pipeline.yaml` with the artifacts between them."""
    page = Drawing(960, 400)
    row, low = 110, 250
    page.box(80, row, 110, 48, "prompts")
    page.box(250, row, 130, 60, "rollout\nengine", ENGINE)
    page.box(450, 60, 130, 48, "reward")
    page.box(450, 165, 130, 60, "logprobs\ntrainer", TRAINER)
    page.box(650, row, 130, 60, "train\ntrainer", TRAINER)
    page.box(860, row, 130, 48, "calibrate")
    page.box(860, low, 130, 60, "sync\nengine", ENGINE)
    page.box(650, low, 130, 60, "evaluate\nengine", ENGINE)
    page.box(450, low + 50, 130, 48, "record")
    page.arrow([(135, row), (185, row)])
    page.arrow([(315, row - 15), (350, 60), (385, 60)], "completions", (340, 46))
    page.arrow([(315, row + 15), (350, 165), (385, 165)], "with log-probs", (322, 178))
    page.arrow([(515, 60), (550, 60), (585, row - 15)], "rewards", (560, 46))
    page.arrow([(515, 165), (550, 165), (585, row + 15)], "log-probs", (572, 178))
    page.arrow([(715, row), (795, row)], "next policy")
    page.arrow([(860, row + 24), (860, low - 30)], "scales", (885, 180))
    page.arrow([(795, low), (715, low)], "proof")
    page.arrow([(585, low), (550, low), (515, low + 40)])
    page.arrow([(450, 195), (450, low + 26)], "metrics", (480, 235))
    page.arrow([(385, low + 50), (300, low + 50)], "manifest", (345, low + 38))
    page.box(215, low + 50, 165, 60, "commit\nledger line of the step", DATA, 13)
    loop = [(860, low + 30), (860, 370), (40, 370), (40, 205), (250, 205), (250, row + 30)]
    page.arrow(loop, dashed=True)
    page.text(560, 384, "the next iteration starts with the next policy and its scales", 12)
    page.write("iteration", "Steps of an iteration with the artifacts between them")


def completion() -> None:
    """The types that a completion passes, with the functions that turn one into the next."""
    page = Drawing(960, 305)
    stations = [
        (100, 60, "Problem\na row of the data", DATA),
        (300, 60, "PromptGroup\na prompt with seeds", STEP),
        (500, 60, "Completion\ntokens, log-probs", ENGINE),
        (700, 60, "Episode\nwith its turns", ENGINE),
        (870, 60, "Row\nof the stream", DATA),
        (870, 200, "rollouts\nthe stored table", DATA),
        (690, 140, "Answer\nwhat is judged", STEP),
        (500, 140, "Verdict\nscore and outcome", STEP),
        (690, 260, "ScoredBatch\nlog-probs, entropy", TRAINER),
        (500, 260, "RolloutBatch\npadded tensors", TRAINER),
        (300, 260, "CorrectedBatch\nweights", TRAINER),
        (100, 260, "LossInputs\none loss, one update", TRAINER),
    ]
    for x, y, text, fill in stations:
        page.box(x, y, 150, 52, text, fill, 13)
    labels = {
        "prompt_table": [(175, 60), (225, 60)],
        "generate": [(375, 60), (425, 60)],
        "play": [(575, 60), (625, 60)],
        "row_of": [(775, 60), (795, 60)],
    }
    for label, points in labels.items():
        page.arrow(points, label, ((points[0][0] + points[1][0]) / 2, 22))
    page.arrow([(870, 86), (870, 174)], "row_tables", (905, 130))
    page.arrow([(795, 190), (765, 150)], "answers", (805, 160))
    page.arrow([(615, 140), (575, 140)], "verify", (595, 128))
    page.arrow([(500, 166), (500, 234)], "rollout_batch", (545, 200))
    page.arrow([(795, 215), (765, 250)], "logprobs", (805, 244))
    page.arrow([(615, 260), (575, 260)])
    page.arrow([(425, 260), (375, 260)], "corrected", (400, 226))
    page.arrow([(225, 260), (175, 260)], "Objective", (200, 226))
    page.write("completion", "The types that a completion passes from its prompt to the update")


def modules() -> None:
    """Folders, and which imports which."""
    page = Drawing(960, 430)
    page.box(330, 45, 560, 56, "flows/\none file a flow; cli/ for commands; tracking/ for MLflow and Prefect")
    page.box(330, 130, 560, 50, "tasks/\none file a step, and the step decorator")
    page.arrow([(330, 73), (330, 104)])
    page.arrow([(330, 155), (330, 190)])
    page.parts.append(
        f"<rect x='30' y='190' width='900' height='215' rx='8' fill='none' stroke='{LINE}' stroke-dasharray='6 4'/>"
    )
    page.text(45, 206, "fp8core/ (imports neither Prefect nor MLflow)", 12, "start", True)
    page.box(160, 250, 220, 52, "run/\nopen, loop, commit, resume", DATA, 13)
    page.box(400, 250, 220, 52, "rollout/\nregistry, embedded, vllm/, sglang/", ENGINE, 13)
    page.box(640, 250, 220, 52, "training/\nregistry, exact, packed/, megatron/", TRAINER, 12)
    page.box(840, 250, 150, 52, "store/\nledger, artifacts", DATA, 13)
    page.box(160, 318, 220, 44, "config, data, rewards, cluster", DATA, 13)
    page.box(400, 318, 220, 44, "rl, alignment, evaluation", DATA, 13)
    page.box(640, 318, 220, 44, "models, plan, report, parity", DATA, 13)
    page.box(280, 376, 460, 40, "numerics/: the exact reference, and dispatch", STEP, 13)
    page.box(720, 376, 380, 40, "kernels/: Triton and CUDA, one file an operation", STEP, 13)
    page.arrow([(510, 376), (530, 376)])
    page.box(790, 45, 270, 56, "Prefect\nruns flows and tasks", "white", 13)
    page.box(790, 130, 270, 50, "MLflow\nshows what the ledger holds", "white", 13)
    page.arrow([(655, 45), (610, 45)], dashed=True)
    page.arrow([(610, 60), (655, 120)], dashed=True)
    page.write("modules", "Modules and the direction of imports")


def step() -> None:
    """When each part of a step is on disk."""
    page = Drawing(960, 330)
    page.arrow([(40, 165), (945, 165)])
    page.text(935, 185, "time", 12)
    moments = [
        (105, "prompts", "artifact,\nledger line"),
        (245, "rollout", "a shard for each\nfinished group"),
        (390, "reward, logprobs", "artifacts,\nledger lines"),
        (530, "train", "weights digest,\nledger line"),
        (670, "calibrate, sync", "scales,\nread-back"),
        (810, "record", "manifest, then\nthe step's line"),
    ]
    for x, name, stored in moments:
        page.box(x, 100, 118, 46, name, TRAINER if name == "train" else ENGINE if name == "rollout" else STEP, 13)
        page.arrow([(x, 123), (x, 200)])
        page.box(x, 228, 126, 54, stored, DATA, 12)
    page.text(40, 40, "work", 13, "start", True)
    page.text(40, 285, "on disk: fsynced and renamed before the next step uses it", 13, "start", True)
    page.parts.append("<line x1='895' y1='60' x2='895' y2='270' stroke='#c0392b' stroke-width='2'/>")
    page.text(895, 50, "commit", 13, bold=True)
    page.text(
        480,
        312,
        "before the commit, a kill loses unfinished groups and tasks alone; after it, nothing is generated again",
    )
    page.write("step", "The life of a step: what is on disk at each moment")


def sync() -> None:
    """Trainer to engine, with what proves it."""
    page = Drawing(960, 330)
    page.box(120, 60, 180, 44, "trainer", TRAINER, 15)
    page.box(840, 60, 180, 44, "engine", ENGINE, 15)
    for x in (120, 840):
        page.parts.append(f"<line x1='{x}' y1='82' x2='{x}' y2='310' stroke='{LINE}' stroke-dasharray='3 4'/>")
    messages = [
        (110, "1  FP8 codes and scales, quantised once", True),
        (150, "2  names, shapes and types are compared; a misfit is refused", False),
        (190, "3  copied into the engine's storage, scales last", True),
        (230, "4  digest, version, scales and formats, read back", False),
        (270, "5  probe: both score the same known tokens", True),
        (298, "log-probs", False),
    ]
    for y, text, forth in messages:
        page.arrow([(124, y), (836, y)] if forth else [(836, y), (124, y)])
        page.text(480, y - 9, text, 13)
    page.text(480, 30, "version n + 1: a step fails at the first difference", 14, bold=True)
    page.write("sync", "A sync: export, transfer, read-back, probe")


def exactness() -> None:
    """The same products in two orders, rounded and exact."""
    page = Drawing(960, 300)
    for x, title, fill in ((245, "rounded sums", WARN), (715, "exact sums", TRAINER)):
        page.text(x, 30, title, 16, bold=True)
        page.box(x - 110, 80, 190, 50, "engine\norder a + b + c + d", ENGINE, 13)
        page.box(x + 110, 80, 190, 50, "trainer\norder (a + c) + (b + d)", TRAINER, 13)
        page.arrow([(x - 110, 105), (x - 110, 140)])
        page.arrow([(x + 110, 105), (x + 110, 140)])
        page.box(x, 265, 400, 44, "log-probs differ" if fill == WARN else "log-probs are equal bit for bit", fill, 14)
        page.arrow([(x - 110, 195), (x - 60, 243)])
        page.arrow([(x + 110, 195), (x + 60, 243)])
    page.box(135, 168, 200, 54, "FP32: rounded\nafter every addition", DATA, 13)
    page.box(355, 168, 200, 54, "FP32: another\nlast bit", DATA, 13)
    page.box(605, 168, 200, 54, "128 products fit\n43 of FP64's 53 bits", DATA, 13)
    page.box(825, 168, 200, 54, "the same bits\nin any order", DATA, 13)
    page.parts.append(f"<line x1='480' y1='20' x2='480' y2='285' stroke='{LINE}' stroke-dasharray='3 4'/>")
    page.write("exactness", "Two engines with rounded sums differ; exact sums agree in any order")


def precision() -> None:
    """Where the contract is compared with what runs."""
    page = Drawing(960, 300)
    page.box(150, 150, 220, 90, "precision\nformats, scale rule,\nrounding points", STEP, 14)
    places = [
        (50, "before loading", "can this engine, trainer and\nmachine run it?", "refused, exit code 2", DATA),
        (150, "at each sync", "formats and kernels that the\nengine reports", "the step fails", ENGINE),
        (250, "on every token", "log-probs of engine\nand trainer", "bounds: warn, pause, fail", TRAINER),
    ]
    for y, when, what, effect, fill in places:
        page.arrow([(260, 150 + (y - 150) * 0.3), (370, y)])
        page.box(510, y, 280, 76, f"{when}\n{what}", fill, 14)
        page.arrow([(650, y), (720, y)], "differs", (684, y - 10))
        page.box(825, y, 210, 44, effect, WARN, 13)
    page.write("precision", "The contract is checked before loading, at each sync, and on every token")


if __name__ == "__main__":
    main()
