"""Tokens/s against llama.cpp with the same bits, limited to AVX2 and with all instructions.

Of prompts, and of decoding without one; in turns, with the same number of threads. llama.cpp is its `llama-bench`
(`--llama-avx2 FOLDER`, `--llama-all FOLDER`; without them only this project runs), on the file that `rabbitllm convert
--to gguf` makes of the split: the same blocks. 4bit, 8bit and none are compared with Q4_0, Q8_0 and BF16. A GGUF file
at "none" is run as it is by both. bfloat16 is multiplied as the commands do it (`fast_bfloat16=None`). The rows "busy"
have a busy process on each core, pinned.

    python -m benchmarks decode.instructions [--models NAME=PATH ...] [--schemes q8_0 4bit none ...] [--threads 2]

To build llama.cpp, for each of the two:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36     (unpack; its source is in vendor/llama.cpp)
    cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF \\
      -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \\
      -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF
    make -C build llama-bench                                             (FOLDER is build/bin)

and with all instructions also -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON, as
far as the processor has them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lib import command_line, llama, report
from benchmarks.lib.checkpoint import make_checkpoint
from benchmarks.lib.measure import Spread, spread
from benchmarks.lib.peers import THIS, Outcome, make_layer_files, run_worker
from benchmarks.lib.process import PeerError
from benchmarks.lib.runs import Run, carry_out, failures, ratios, status, versions
from benchmarks.lib.worker import prompt
from rabbitllm.quant.schemes import SCHEMES
from rabbitllm.storage.files import PositionalFile
from tools.matrix import SETS

OURS, PEER, BUSY = "rabbitllm-2", "llama.cpp", "rabbitllm-2 busy"
"""The last one decodes with a busy process on each core."""
BUSY_LIMIT = 2.5
"""How many times as long a token may take then."""
AVX2, ALL = "AVX2", "all"
LIMITS: Mapping[str, Mapping[str, str]] = {
    AVX2: next(instruction_set.variables for instruction_set in SETS if instruction_set.name == "avx2"),
    ALL: {},
}
"""Instructions -> the environment of a process of this project that uses these."""
NONE = "none"
KINDS = {NONE: "BF16", "8bit": "Q8_0", **{name: "Q4_0" for name in SCHEMES if name.startswith("4bit")}}
"""Scheme -> type of llama.cpp's file, of those that have other blocks than ours."""
VOCABULARY = 256
"""Token ids below it are in every model here."""
REPEATED = 3
"""Measured prompts and generations of a process, after one that is not."""


@dataclass(frozen=True)
class InstructionsCase:
    """A row."""

    runner: str
    model: str
    scheme: str
    instructions: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.scheme} {self.instructions} {self.runner}"


@dataclass
class SpeedRun(Run):
    """One row of one turn; seconds a token of decoding, and of a prompt."""

    token_seconds: float = 0.0
    prompt_seconds: float = 0.0

    @property
    def headline(self) -> float:
        """Seconds a token."""
        return self.token_seconds


def tabulate(runs: Sequence[SpeedRun], cases: Sequence[InstructionsCase], turns: int) -> report.Table:
    """A line a row."""

    def against_peer(of: Callable[[SpeedRun], float]) -> Callable[[InstructionsCase, Sequence[SpeedRun]], str]:
        def cell(case: InstructionsCase, _: Sequence[SpeedRun]) -> str:
            return report.shown(speed_beside(runs, case, of)) if case.runner == OURS else ""

        return cell

    def of_quiet(case: InstructionsCase, _: Sequence[SpeedRun]) -> str:
        return report.shown(slower_when_busy(runs, case)) if case.runner == BUSY else ""

    columns: report.Columns[InstructionsCase, SpeedRun] = {
        "tokens/s": report.each(lambda run: 1 / run.token_seconds, 1),
        "x llama.cpp": against_peer(lambda run: run.token_seconds),
        "prompt tokens/s": report.each(lambda run: 1 / run.prompt_seconds, 0),
        "x llama.cpp, prompt": against_peer(lambda run: run.prompt_seconds),
        "x as long as quiet": of_quiet,
    }
    return report.tabulated(runs, {case.name: case for case in cases}, turns, columns)


def speed_beside(runs: Sequence[SpeedRun], case: InstructionsCase, of: Callable[[SpeedRun], float]) -> Spread | None:
    """How many times as many tokens a second as llama.cpp's row of the same model, scheme and instructions."""
    peer = InstructionsCase(PEER, case.model, case.scheme, case.instructions)
    return ratios(runs, peer.name, case.name, of)


def slower_when_busy(runs: Sequence[SpeedRun], case: InstructionsCase) -> Spread | None:
    """How many times as long a token takes with a busy process on each core as without."""
    return ratios(runs, case.name, replace(case, runner=OURS).name)


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """A process on each core that never waits, of ordinary priority."""
    busy = "import os, sys; os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))\n"
    busy += "os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", busy, str(core)]) for core in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def bench(program: Path, file: Path, prompt_tokens: int, tokens: int, threads: int) -> tuple[float, float]:
    """Run `llama-bench`: seconds a token of decoding and of a prompt, medians of its repetitions.

    Raises:
        PeerError: it failed.
    """
    sizes = ["-p", str(prompt_tokens), "-n", str(tokens), "-r", str(REPEATED), "-t", str(threads), "-ngl", "0"]
    command = [str(program), "-m", str(file), *sizes, "-o", "json"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
        raise PeerError(f"{program} failed: {''.join(said)}") from error
    results = json.loads(process.stdout)
    spreads = {result["n_gen"] > 0: spread(1 / speed for speed in result["samples_ts"]) for result in results}
    decoding, prompts = spreads.get(True), spreads.get(False)
    if decoding is None or prompts is None:
        raise PeerError(f"{program} gave no figures")
    return decoding.median, prompts.median


@dataclass(frozen=True)
class Subjects:
    """Makes the files of each model and scheme in a folder, and measures them.

    Attributes:
        models: name -> folder of a checkpoint, or file.
        prompt_tokens, tokens: of a prompt, and to generate.
        programs: instructions -> `llama-bench`.
    """

    models: dict[str, Path]
    folder: Path
    work: Path
    prompt_tokens: int
    tokens: int
    threads: int
    programs: Mapping[str, Path]

    def split_of(self, model: str, scheme: str) -> Path:
        """The folder of layer files."""
        return self.folder / f"{model}-{scheme}"

    def file_of(self, model: str, scheme: str) -> Path:
        """llama.cpp's file."""
        original = self.models[model]
        return original if original.suffix == ".gguf" and scheme == NONE else self.folder / f"{model}-{scheme}.gguf"

    def make(self, model: str, scheme: str, *, for_peer: bool) -> None:
        """Make layer files, and llama.cpp's file if it is asked for.

        Raises:
            PeerError: it failed.
        """
        original, place = self.models[model], self.split_of(model, scheme)
        compression = None if scheme == NONE else scheme
        if not place.exists():
            make_layer_files(THIS, "rabbitllm", original, place, compression, self.work, f"{place.name}-split")
        file = self.file_of(model, scheme)
        if for_peer and not file.exists():
            ggml_type = KINDS.get(scheme)
            source = original if ggml_type else next(path.parent for path in place.rglob("split.json"))
            llama.write_file(source, file, ggml_type or "auto")
            os.sync()
            for written in (file, *place.rglob("*.safetensors")):  # cached neither, as a split leaves its files
                with PositionalFile(written) as pages:
                    pages.drop_cache(0, pages.size())

    def measure(self, run: SpeedRun, case: InstructionsCase) -> None:
        """Measure a row: llama.cpp, or this project in processes with these instructions.

        Raises:
            PeerError: it failed.
        """
        if case.runner == PEER:
            file, program = self.file_of(case.model, case.scheme), self.programs[case.instructions]
            speeds = bench(program, file, self.prompt_tokens, self.tokens, self.threads)
            run.token_seconds, run.prompt_seconds = speeds
            return
        job = {
            "task": "requests",
            "package": "rabbitllm",
            "loader": "layered",
            "checkpoint": str(self.models[case.model]),
            "options": {"layer_shards_saving_path": str(self.split_of(case.model, case.scheme)), "fast_bfloat16": None}
            | ({} if case.scheme == NONE else {"compression": case.scheme}),
            "warm_up": 1,
            "endless": True,
        }
        variables = {**LIMITS[case.instructions], "OMP_NUM_THREADS": str(self.threads)}
        label = f"instructions-{run.row.replace(' ', '-')}-{run.turn}"

        def asked(length: int, tokens: int) -> Outcome:
            prompts = [prompt(number, length, VOCABULARY) for number in range(1 + REPEATED)]
            request = {**job, "prompts": prompts, "tokens": tokens}
            return run_worker(THIS, request, self.work, f"{label}-{length}", [], more_variables=variables)

        with busy_cores() if case.runner == BUSY else contextlib.nullcontext():
            decoding, prompts = asked(1, self.tokens), asked(self.prompt_tokens, 2)
        run.prompt_seconds = prompts.answer["first_token_seconds"] / self.prompt_tokens
        run.take(replace(decoding, answer={"token_seconds": decoding.answer["token_seconds"]}))


def _named(word: str) -> tuple[str, Path]:
    """NAME=PATH, or a path whose last part is the name."""
    name, _, path = word.rpartition("=")
    absolute = Path(path).expanduser().absolute()
    return name or absolute.stem, absolute


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 5, [OURS, PEER, BUSY])
    parser.add_argument(
        "--models", nargs="+", type=_named, default=[], metavar="NAME=PATH", help="(default: random weights of --scale)"
    )
    parser.add_argument("--schemes", nargs="+", default=["q8_0", "q4_0", "8bit", "4bit", NONE], help="of the splits")
    parser.add_argument("--instructions", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--llama-avx2", type=Path, metavar="FOLDER", help="with llama-bench built for AVX2")
    parser.add_argument("--llama-all", type=Path, metavar="FOLDER", help="with llama-bench built for this processor")
    parser.add_argument("--threads", type=int, default=2, help="of each process (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="to generate, at least 2 (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of a prompt (default: %(default)s)")
    smallest = {"tokens": 3, "prompt_tokens": 16, "threads": 1, "schemes": ["q8_0"], "instructions": [ALL]}
    options = command_line.parsed(parser, arguments, only=[OURS, PEER], **smallest)
    command_line.settle(options, "instructions")
    command_line.check_tokens(options)
    folders = {AVX2: options.llama_avx2, ALL: options.llama_all}
    programs = {name: folder.absolute() / "llama-bench" for name, folder in folders.items() if folder is not None}
    cases = [
        InstructionsCase(runner, model, scheme, instructions)
        for model in dict(options.models) or {f"random {options.scale}": None}
        for scheme in options.schemes
        for instructions in options.instructions
        for runner in options.only
        if runner != PEER or instructions in programs
    ]
    folder = options.work_dir / "instructions-run"
    subjects = Subjects(
        dict(options.models), folder, options.work_dir, options.prompt_tokens, options.tokens, options.threads, programs
    )

    def files(runner: str) -> None:
        if not subjects.models:  # llama.cpp needs a vocabulary
            (target := folder / "checkpoint").mkdir()
            checkpoint = make_checkpoint(options.work_dir, options.scale, "LlamaConfig")
            subjects.models[cases[0].model] = llama.with_vocabulary(checkpoint, target)
        for case in cases:
            if case.runner == runner:
                subjects.make(case.model, case.scheme, for_peer=runner == PEER)

    environments = dict.fromkeys((case.runner for case in cases), THIS)
    runs = carry_out(options, cases, SpeedRun, subjects.measure, environments, folder, files)
    notes = [
        f"Decoding {options.tokens} tokens without a prompt, and prompts of {options.prompt_tokens}; "
        f"{options.threads} threads; medians of {REPEATED} after one that does not count.",
        "x llama.cpp: how many times as many tokens a second as llama.cpp with the same bits and instructions.",
        *versions(runs),
        *failures(runs),
        *(
            report.reach(
                f"{case.name}, of quiet", report.median(slower_when_busy(runs, case)), BUSY_LIMIT, at_most=True
            )
            for case in cases
            if case.runner == BUSY and OURS in options.only
        ),
    ]
    title = f"Tokens/s with AVX2 and with all instructions, {command_line.turns(options)}"
    report.write(options.results, title, tabulate(runs, cases, options.turns), notes, runs, work=options.work_dir)
    return status(runs, lambda row: not row.endswith(PEER))
