"""Benchmarks of splitting, decoding, experts, serving, batches, quality and scale, with other projects in the same run.

    python -m benchmarks list
    python -m benchmarks decode.capped --turns 3

`list` says what each benchmark measures, needs and takes. A folder is a subject; `lib` is what they share. Most make a
checkpoint of 1.43 GB and an environment for each peer in benchmarks/work; delete that folder when you are done. They
run all rows in turns and print a table. Files in benchmarks/results: NAME.md has the table, NAME.json has `machine`,
`versions_here`, `versions` (of the peers, by row), `rows` (median, low and high of each figure), `runs` (every run) and
`picture`, from which NAME.svg is drawn; `python -m benchmarks picture NAME.json` draws it again. `--smallest` shows
within seconds that a benchmark runs, without peers that have to be installed, and leaves no file; `--scale tiny` takes
a few minutes. The figures of both mean nothing. Let nothing else run meanwhile. Linux only.
"""
