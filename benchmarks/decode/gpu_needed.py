"""Whether there is a GPU to measure on, and if not, what was found and what to do. Makes no CUDA context."""

from __future__ import annotations

from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")


def what_is_missing(driver: Path = DRIVER) -> str | None:
    """None where torch sees a GPU; else three lines: what was found, what is needed, what to do."""
    import torch

    if torch.cuda.is_available():
        return None
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    loaded = driver.exists()
    found = f"torch {torch.__version__} {built}, and NVIDIA's driver is {'loaded' if loaded else 'not loaded'}"
    if not loaded:
        remedy = (
            "use a machine with an NVIDIA GPU and its driver (on Kaggle and Colab: choose an accelerator in the "
            "session's settings; in a container: start it with --gpus all)"
        )
    elif torch.version.cuda:
        remedy = "see whether `nvidia-smi` lists the GPU, and whether CUDA_VISIBLE_DEVICES hides it"
    else:
        remedy = (
            "install a torch that is built with CUDA (https://pytorch.org/get-started says how), and run this again"
        )
    return (
        f"Found no GPU: {found}.\n"
        "Needed: Linux, one NVIDIA GPU, its driver, and a torch that is built with CUDA.\n"
        f"What to do: {remedy}."
    )
