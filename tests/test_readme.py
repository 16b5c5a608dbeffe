"""README and docs: Python runs as it stands, against a hub that serves the repositories it names; links and figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rabbitllm.cli.main import app
from tests.support.builders import build_checkpoint
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.picture_models import build as build_with_pictures
from tests.support.picture_models import picture
from tests.support.quick_measuring import quick_measuring  # noqa: F401  a fixture that applies by itself
from tests.support.tiny_models import one_thread, plain_model  # noqa: F401  another one

ROOT = Path(__file__).parent.parent
OPTIONAL = ("peft", "lm_eval", "langchain_huggingface")
"""Libraries whose blocks run where they are installed."""
RUN_ELSEWHERE = {"docs/walkthrough/README.md"}
"""Pages whose Python other tests run."""
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
}
README = PAGES["README.md"]
BLOCKS = [
    (page, language, code)
    for page, text in PAGES.items()
    if page not in RUN_ELSEWHERE
    for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
]
PYTHON = [(page, code) for page, language, code in BLOCKS if language == "python"]
COMMANDS = {command.name for command in app.registered_commands}
FIGURE = re.compile(r"\d+\.\d+")
VERSIONS = re.compile(r"(?:RabbitLLM|AirLLM|oLLM|Qwen|Llama|transformers) ?\d+\.\d+(?:\.\d+)?")
MEASURED = "".join(
    page.read_text(encoding="utf-8")
    for name in ("docs/PERFORMANCE.md", "benchmarks/results/quality*.md")
    for page in ROOT.glob(name)
)
"""Of pages that say where figures come from."""
SUPPORTED = "docs/reference/supported-models.md"


def test_only_known_languages() -> None:
    assert {language for _, language, _ in BLOCKS} <= {"python", "bash", "text"}
    assert any(page == "README.md" for page, _ in PYTHON)


def serve_what_is_named(code: str, hub: Path) -> None:
    for repository in re.findall(r'"([\w.-]+/[\w.-]+)"', code):
        if "-VL-" in repository:
            build_with_pictures(hub / repository, "qwen3_vl", dtype=torch.bfloat16)
        else:
            build_checkpoint(hub / repository, "qwen2", dtype=torch.bfloat16, shards=3)


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[f"{page}: {code.split()[-1][:40]}" for page, code in PYTHON])
def test_python_block_runs(
    page: str,
    code: str,
    hub_environment: HubEnvironment,
    local_hub: LocalHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_what_is_named(code, tmp_path / "hub")
    work = tmp_path / "work"
    work.mkdir()
    source = build_checkpoint(work / "my-checkpoint", "qwen3", dtype=torch.bfloat16, shards=2)
    picture().save(work / "photo.jpg")
    for library in OPTIONAL:
        if f"from {library} " in code:
            pytest.importorskip(library)
    if "my-adapter" in code:
        build_adapter(source, work / "my-adapter")
    if "lm_eval" in code:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", work / "datasets")
    monkeypatch.chdir(work)
    exec(compile(code, page, "exec"), {})


def build_adapter(checkpoint: Path, folder: Path) -> None:
    """A LoRA adapter that changes nothing yet."""
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(plain_model(checkpoint), settings).save_pretrained(folder)


def test_the_first_block_leaves_no_shard(hub_environment: HubEnvironment, local_hub: LocalHub, tmp_path: Path) -> None:
    code = next(code for page, code in PYTHON if page == "README.md")
    serve_what_is_named(code, tmp_path / "hub")
    exec(code, {})
    assert len([*hub_environment.home.glob("rabbitllm/*/*/splitted_model.auto/split.json")]) == 1
    assert [path for path in hub_environment.home.rglob("*") if "-of-" in path.name] == []


def test_the_readme_counts_the_commands_and_names_some() -> None:
    [row] = re.findall(r"^\| commands \|.*$", README, re.MULTILINE)
    assert re.findall(r"\[(\d+)\]", row) == [str(len(COMMANDS))]
    assert set(re.findall(r"`(\w+)`", row)) <= COMMANDS


def test_the_readme_counts_the_classes_that_were_examined() -> None:
    found = re.findall(r"^- \*\*(.+?)\*\* \((\d+)\)", PAGES[SUPPORTED], re.MULTILINE)
    counts = {result: int(number) for result, number in found}
    [row] = re.findall(r"^\| models \|.*$", README, re.MULTILINE)
    assert f"{counts['ok']} of {sum(counts.values())} " in row


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", PAGES[page]):
        there = (ROOT / page).parent / target if target else ROOT / page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{target}#{anchor}"


@pytest.mark.parametrize(
    ("page", "least"), [("README.md", 30), ("docs/guides/kaggle-and-colab.md", 8), ("docs/guides/compression.md", 40)]
)
def test_figures_are_those_that_were_measured(page: str, least: int) -> None:
    """Those of its tables; where they come from is said in the pages of measurements."""
    tables = "\n".join(line for line in PAGES[page].splitlines() if line.startswith("|"))
    figures = FIGURE.findall(VERSIONS.sub("", tables))
    assert len(figures) >= least
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", MEASURED)] == []


@pytest.mark.long
def test_pip_install_gives_the_command(tmp_path: Path) -> None:
    """`pip install .`, without what it depends on: that is here already."""
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(ROOT)]
    subprocess.run(install, check=True)
    run = subprocess.run(
        [target / "bin" / "rabbitllm", "--version"],
        env={"PYTHONPATH": str(target), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "rabbitllm 2.0.0"
    assert (target / "rabbitllm" / "demo" / "score.json").exists()


def test_the_first_example_of_the_readme_uses_the_chat_template() -> None:
    """An instruct model answers nothing without."""
    first = next(code for page, code in PYTHON if page == "README.md")
    assert "Instruct" in first
    assert "apply_chat_template(" in first


def test_the_first_screen_names_the_two_commands_and_the_small_torch_comes_first() -> None:
    first_screen = "\n".join(README.splitlines()[:24])
    assert "`make demo`" in first_screen
    assert "`make test`" in first_screen
    for page in ("README.md", "docs/guides/first-model.md", "docs/index.md"):
        installs = re.findall(r"^pip install .*", PAGES[page], re.MULTILINE)
        assert installs == ["pip install torch --index-url https://download.pytorch.org/whl/cpu", "pip install ."]
