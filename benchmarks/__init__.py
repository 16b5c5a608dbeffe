"""What the README claims about speed, disk and memory, measured with other projects in the same run. Linux only.

    python -m benchmarks.split
    python -m benchmarks.decode
    python -m benchmarks.kaggle_72b
    python -m benchmarks.lazy_load
    python -m benchmarks.around_weights
    python -m benchmarks.vram
    python -m benchmarks.serve
    python -m benchmarks.batch
    python -m benchmarks.shared_prompt
    python -m benchmarks.alone_or_together
    python -m benchmarks.ray_data

`kaggle_72b` rehearses the split of a model of 150 GB within the disk of a Kaggle machine, and `lazy_load` opens files
of 2.8 GB; their own texts say how. `around_weights` streams a model of 0.3 GB. `vram` needs a GPU, and 14 GB of disk.
`serve` and its two companions, `batch` and `ray_data` say themselves what they need. The others make a checkpoint of
1.43 GB and a virtual environment for every peer in the folder `work` here (about 10 GB in all, more where pip brings a
torch with CUDA; delete it when done), run all of it in turns, print a table, and write it with every raw row to
`results`. `--scale tiny` tries the machinery out in a few minutes; its figures mean nothing. `--smallest` runs any
of them within seconds, without peers that are to be installed, and leaves no file. Nothing else should run meanwhile.
"""
