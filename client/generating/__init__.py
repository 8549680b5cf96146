"""From a prompt to a whole output, over any number of attempts on any number of members.

`attempt_stream` sends one request to one worker, `attempt_verdicts` decides what the end of an
attempt means, `attempts` repeats until the output is whole, `generate_call` joins the outputs.
"""
