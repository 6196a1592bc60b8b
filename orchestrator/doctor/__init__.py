"""What `lastgood doctor` knows: measures one machine and one storage, says what is wrong and what saves will cost.

`facts` is what is measured, and what `--json` prints; the modules beside it measure; `findings` and `expect` judge, and
are pure. A measurement that a machine does not allow is None, or carries its reason: it never ends the examination.
"""
