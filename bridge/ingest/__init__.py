"""The Spark job: it brings exported objects from S3 into a table, exactly once, and proves completeness.

One run (`job.run`):

    list the prefix -> plan from the object keys (planner) -> Spark tasks read, check and write
    (worker, decode, files) -> one commit of data files and state (sinks, state) -> repeat until
    nothing is new -> report what is there and what is missing (report).

No message passes through the driver: tasks receive object keys and return the names of data files. The state
lists, for every stream, the intervals of sequence numbers in the table. The table's commit names the current
state, so a crash at any point leaves unused files at worst.

Importing this package needs only the standard library; running it needs the extra `[spark]`.
"""
