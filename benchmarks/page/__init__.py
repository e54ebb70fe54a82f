"""docs/benchmarks.md and README's table, written by a command, all of one commit.

    python -m benchmarks.page                     measure what this commit has no record of (quick: 20 minutes), then write both
    python -m benchmarks.page --profile full      everything that this machine can run (hours)
    python -m benchmarks.page --only models/      measurements whose names begin so; again and again until all are there
    python -m benchmarks.page --write             write from what there is, measure nothing
    python -m benchmarks.page --list              what there is to measure, how long each may take, and what has a record

    measurements -> a process each, with a budget -> records (benchmarks/results/page/COMMIT/NAME.json) -> the page, README's table

A measurement is a row of `benchmarks.page.measurements`: a command, what it compares, what is asked of it. Its record says of which
commit, machine, versions and threads it is. The page is rendered from records of one commit and never from others: a tree with
changes is refused, or (`--dirty`) the page says so. What was not measured stands on the page with the reason.
"""
