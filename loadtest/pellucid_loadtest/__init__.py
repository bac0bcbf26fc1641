"""A load test of `Generate` with Locust: what it sends, how it measures, and the report.

options, lengths            command-line flags -> LoadOptions
workloads, arrivals         (seed, number) -> request; seed -> arrival times
sending, records            one request over one channel -> Record
session                     the run inside one process: hands out work, keeps records, drains
users, plugin               Locust's users and events: they start and stop sessions, across processes too
summaries, report           records -> numbers
console, charts, page       numbers -> what people read; `writing` makes the files
"""
