"""Faults of an endpoint that the job reaches by its address, such as an object store or a rendezvous. A Toxiproxy
server is put in front of the endpoint."""
