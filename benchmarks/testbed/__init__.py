"""Stand-ins for everything around a gateway: AWS, web servers, links, brokers, certificates, MQTT clients.

The tests, the benchmarks and the soak share them. They import nothing from `tests`; `make lint` checks that.
"""
