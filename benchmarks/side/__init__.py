"""The side-by-side: Hotfuse and what users would take instead, on one machine, in one run (`hotfuse bench`).

    cases        what is measured: kernels, models, traffic, ...; built alike in every process from a seed
    traffic      seeded streams of requests: lengths, padding, batch sizes, shifts, branches, bursts
    contenders   how each of the others loads a model and answers a call
    child        one contender in a process of its own, which does what it is told over a pipe
    turns        the coordinator: one contender runs at a time, the others are stopped
    stats        medians, their confidence intervals, ratios, geomeans
    records      JSON lines, and the comparison of two runs
    report       the table;  plots: the pictures
"""
