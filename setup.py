"""Package metadata. Tool settings are in pyproject.toml; exact versions of a tested set are in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
ABOUT: dict[str, str] = {}
exec((ROOT / "rabbitllm" / "version.py").read_text(), ABOUT)

setup(
    name="rabbitllm",
    version=ABOUT["__version__"],
    description="Run language models that fit neither the GPU, nor RAM, nor (while they are prepared) the disk",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["rabbitllm", "rabbitllm.*"]),
    package_data={
        "rabbitllm": ["py.typed"],
        "rabbitllm.evaluation": ["text.txt"],
        "rabbitllm.demo": ["score.json", "model/*"],
        "rabbitllm.estimate.doctor": ["models.json"],
        "rabbitllm.server": ["static/*"],
    },
    # the lowest versions with which the tests pass, all of them together (Python 3.11)
    install_requires=[
        "torch>=2.10",
        "transformers>=5.6",
        "accelerate>=1.1",
        "safetensors>=0.8",
        "bitsandbytes>=0.50",  # before 0.49 its 8bit kernel for the CPU crashes on a block of zeros
        "huggingface_hub>=1.27",
        "psutil>=5.9",
        "filelock>=3.16",
        "numba>=0.60",
        "zlib-ng>=1",
        "typer>=0.16",  # comes with transformers
        "rich>=13",  # comes with transformers
    ],
    extras_require={
        "dev": [
            "pytest",
            "hypothesis",
            "ruff",
            "mypy",
            "import-linter>=2",
            "sentencepiece",
            "gguf>=0.18",
            "tiktoken",
            "matplotlib",
            "compressed-tensors>=0.15",
            "pytest-xdist",
            "peft",
            "fastapi>=0.115",
            "uvicorn>=0.30",
            "greenlet>=3.1",
            "openai>=2",
            "httpx>=0.27",
            "pyarrow>=15",
            "ray>=2.60",
        ],
        # pydantic for lines of OpenAI's format, pyarrow for Parquet
        "batch": ["greenlet>=3.1", "pydantic>=2", "pyarrow>=15"],
        "serve": ["fastapi>=0.115", "uvicorn>=0.30", "greenlet>=3.1"],
        "ray": ["ray>=2.60"],
        "ecosystem": ["lm_eval>=0.4.13", "langchain-huggingface>=0.3.1"],
        "plot": ["matplotlib>=3.9"],
        "fuzz": ["atheris>=3"],
    },
    entry_points={"console_scripts": ["rabbitllm = rabbitllm.cli.main:main"]},
    classifiers=[
        "License :: OSI Approved :: MIT License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
