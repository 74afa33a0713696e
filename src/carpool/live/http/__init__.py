"""Both ends of the HTTP API: the gate, the routes and their words, who may do what, and the client."""
