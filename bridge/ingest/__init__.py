"""The Spark side: what gateways exported to S3, exactly once in a table, proven complete.

How a run goes (`job.run`):

    list the prefix -> plan from the names of the objects (planner) -> Spark tasks read, check and write
    (worker, decode, files) -> one commit of the data files and of the state (sinks, state) -> repeat until
    nothing is new -> report what is there and what is missing (report).

No message crosses the driver: tasks get names of objects and give back names of data files. The state
says for every stream which sequence numbers are in the table, as intervals; the table's commit says
which state is true, so a crash anywhere leaves unused files at worst.

Importing this package needs nothing but the standard library; running it needs `streambridge[spark]`.
"""
