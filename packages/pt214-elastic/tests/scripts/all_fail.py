"""A worker whose every rank makes the same mistake in the first step."""

import pt214_elastic

el = pt214_elastic.init(on_fault="shrink")
for step in el.steps(3):
    with step:
        raise ValueError("the same mistake everywhere")
