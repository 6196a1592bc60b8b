"""The judge: lastgood's guarantees as named checks over what a run left behind.

Every check reads the recorded history alone (ledger, markers of faults, sample journals, generations, checkpoints),
never the live system, and writes nothing. So a run that failed can be judged again later, by anyone, with other terms.
"""
