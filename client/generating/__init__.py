"""From a prompt to a whole output, over any number of attempts on any number of members.

`wire` speaks to one worker once, `verdicts` decides what the end of an attempt means, `attempts` does
it again until the output is whole, `calls` joins the outputs. Publishing weights is none of it.
"""
