"""Programs that nobody has read, run in cells: processes that can compute and print, and nothing else.

`cell` runs one, `zygote` is the process that cells are forked from, `confinement` is what they give up.
`caller` and `checker` are programs for cells themselves: the two halves of an assertion.
"""
