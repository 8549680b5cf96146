"""Break the code on purpose, one small change at a time, and see whether a test notices.

    make mutants                                  every module of `modules.toml`, 40 mutants of each
    make mutants MODULES=core/gangs SAMPLE=500    one module, as many mutants as it has

A *mutant* is the tree with one change: a comparison swapped, an operand or a statement dropped, a
keyword argument left out. The tests that `modules.toml` names for the module run on it; a mutant on
which all of them pass has *survived*, and its diff is printed: a line that no test holds.

`edits` finds the changes, `trials` runs the tests on each, `__main__` samples and reports.
Ready tools were tried first. mutmut 3.8 runs on this layout, but it changes neither decorated
functions (all properties) nor constants of a module, and it drops no operand, no condition of a
comprehension and no statement: the kind of mutant that survived here when it was made by hand.
cosmic-ray 8.7 was only read: by its list of operators it lacks the same ones.
"""
