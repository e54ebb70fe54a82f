"""What outlives a process: captured graphs, kernels, verdicts and plans, addressed by what they were made of.

    address   what an entry is about, and everything it rests on; its name is a digest of both
    entry     one entry as bytes: a JSON header, raw blobs, a signature over all of it and its name
    keys      who may sign: a key of the user's own, or one that a fleet shares
    folder    a directory of entries for many processes at once, bounded, the least recently used leaving first
    flight    one process makes what several want

Entries are data, never pickles. Machine code among them is loaded only where the signature holds, the name is the one asked
for, and the features it uses were seen to execute.
"""
