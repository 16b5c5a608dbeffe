"""Benchmarks of splitting, decoding, experts, serving, batches, quality and scale, against other projects in one run.

    python -m benchmarks list
    python -m benchmarks decode.capped --turns 3

`list` names each benchmark with its subject, its needs and its cost. Each folder is a subject, and `lib` is shared.
Most benchmarks make a checkpoint of 1.43 GB with random weights and an environment for each peer in benchmarks/work;
delete that folder afterwards. `--smallest` shows within seconds that a benchmark runs, without peers that must be
installed, and leaves no file; `--scale tiny` takes a few minutes. The figures of both mean nothing. Run nothing else
meanwhile. Linux only.

Method: each run has a process of its own; all rows run once in each turn, and each turn begins with another row. Files
are out of the page cache when a run begins. Generation is greedy, with batch 1 and a prompt of 16 tokens unless options
say otherwise; seconds a token are the median of the steps after the first token. Under a cap, a process runs in a
control group whose limit is its use once its libraries are imported, plus a share of the size of the weights; page
cache counts. Bytes from the disk are those of the process as the system counts them.

Results in benchmarks/results: NAME.md has the table; NAME.json has `machine`, `versions_here`, `versions` (of the
peers, by row), `rows` (median, low and high of each figure), `runs` and `picture`, from which NAME.svg is drawn
(`python -m benchmarks picture NAME.json` draws it again).
"""
