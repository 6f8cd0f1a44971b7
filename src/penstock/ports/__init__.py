"""The boundaries: small Protocols through which the loop, the scheduler and the supervisor use the other parts.

Read `work`, `training`, `inference` and `group_pool` to understand the loop. Tests run each part alone with
`tests/scripted_policy.py` and `tests/fake_ports.py`. Every method that waits may raise `penstock.deadline.Stalled`.
"""
