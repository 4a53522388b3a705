"""From a record to a Result: the gates that every fault must pass, then the assertions. Pure.

`verdict` is where it begins. A fault that did not land, or was not felt, proves nothing, whatever the assertions
say."""
