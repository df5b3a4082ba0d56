"""The scheduler's parts, each with one duty; `pagedjax.scheduler` joins them. Never imports JAX.

`draft` decides a step by arithmetic, `journal` makes its page changes a transaction,
`plan_builder` turns it into arrays, `roster` moves sequences between queues and slots,
`result_reader` takes in what was sampled, `live` and `adjustments` are what is known of a request,
and `integrity` checks that all of them agree.
"""
