//! Metrics: how much is going on and how it went, as text for a scrape.
//!
//! Their registry belongs to one gateway and is no global of the process, since a program may embed two gateways and wants to
//! tell their numbers apart; `prometheus-client` is made that way. Every label comes from a closed list, so that no client can
//! make the list of series grow. A metric that exists already is found without allocating.

use crate::caller::Transport;
use portcullis_protocol::denial::{Denial, Denials, Layer};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::time::Duration;

/// Bounds of the histogram of requests, in seconds: from a call that the gateway answers itself to one at its deadline.
const REQUEST: [f64; 13] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0];
/// Bounds of the histogram of processes, in seconds.
const PROCESS: [f64; 10] = [0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0, 86_400.0];

/// The numbers of one gateway.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    connections_active: Family<OfTransport, Gauge>,
    connections: Family<OfTransport, Counter>,
    requests: Family<OfRequest, Counter>,
    request_seconds: Family<OfMethod, Histogram, Buckets>,
    processes_active: Gauge,
    processes_finished: Family<OfResult, Counter>,
    process_seconds: Family<OfResult, Histogram, Buckets>,
    helpers_active: Family<OfRole, Gauge>,
    spawners_replaced: Counter,
    bytes: Family<OfDirection, Counter>,
    denials: Family<OfLayer, Counter>,
    sessions_active: Gauge,
    sessions_detached: Gauge,
    refused: Family<OfReason, Counter>,
    relay_connected: Gauge,
    relay_held: Gauge,
    relay_shed: Counter,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessEnd {
    /// With status 0.
    Success,
    /// With another one.
    Error,
    /// By a signal, whoever sent it, or with its sandbox or its gateway.
    Terminated,
}

impl ProcessEnd {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Error => "error",
            Self::Terminated => "terminated",
        }
    }
}

/// Which way messages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From clients.
    In,
    /// To clients.
    Out,
}

/// Why a client is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It showed no credential, or another one.
    Auth,
    /// There are as many connections as there may be.
    Full,
    /// Too many connections had sent no whole request, and this one was closed.
    Silent,
    /// It is a web page.
    Origin,
    /// It means another host.
    Host,
    /// It was started by the gateway, or may have been.
    Peer,
    /// The server stops.
    Stopping,
}

impl Refused {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Auth => "auth",
            Self::Full => "full",
            Self::Silent => "silent",
            Self::Origin => "origin",
            Self::Host => "host",
            Self::Peer => "peer",
            Self::Stopping => "stopping",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTransport {
    transport: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfRequest {
    transport: &'static str,
    method: &'static str,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfMethod {
    transport: &'static str,
    method: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfResult {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfRole {
    role: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfDirection {
    direction: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfLayer {
    layer: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfReason {
    reason: &'static str,
}

/// Makes the histograms of a family.
#[derive(Debug, Clone)]
struct Buckets(&'static [f64]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

/// Something that is there for as long as this is.
#[derive(Debug)]
pub(crate) struct Present(Gauge);

impl Present {
    fn new(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let request_seconds = Family::new_with_constructor(Buckets(&REQUEST));
        let process_seconds = Family::new_with_constructor(Buckets(&PROCESS));
        let mut metrics = Self {
            registry: Registry::with_prefix("exec_server"),
            connections_active: Family::default(),
            connections: Family::default(),
            requests: Family::default(),
            request_seconds,
            processes_active: Gauge::default(),
            processes_finished: Family::default(),
            process_seconds,
            helpers_active: Family::default(),
            spawners_replaced: Counter::default(),
            bytes: Family::default(),
            denials: Family::default(),
            sessions_active: Gauge::default(),
            sessions_detached: Gauge::default(),
            refused: Family::default(),
            relay_connected: Gauge::default(),
            relay_held: Gauge::default(),
            relay_shed: Counter::default(),
        };
        metrics.register();
        metrics
    }

    /// Names everything. Counters get `_total` behind their names when they are written.
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("connections_active", "Clients that are connected", self.connections_active.clone());
        registry.register("connections", "Clients that were connected", self.connections.clone());
        registry.register("requests", "Requests that were answered, or whose connection ended before", self.requests.clone());
        let text = "From a request's arrival to its answer";
        registry.register_with_unit("request_duration", text, Unit::Seconds, self.request_seconds.clone());
        registry.register("processes_active", "Processes that run", self.processes_active.clone());
        registry.register("processes_finished", "Processes that ended", self.processes_finished.clone());
        let text = "From a process's start to its end";
        registry.register_with_unit("process_duration", text, Unit::Seconds, self.process_seconds.clone());
        registry.register("helpers_active", "Helpers that run", self.helpers_active.clone());
        let text = "Spawners that died and were replaced";
        registry.register("spawners_replaced", text, self.spawners_replaced.clone());
        registry.register("bytes", "Bytes of messages", self.bytes.clone());
        registry.register("denials", "What layers of sandboxes were seen to refuse", self.denials.clone());
        registry.register("sessions_active", "Sessions that live", self.sessions_active.clone());
        registry.register("sessions_detached", "Sessions that live and nobody is connected to", self.sessions_detached.clone());
        registry.register("refused", "Clients that were not let in", self.refused.clone());
        let text = "Whether there is a connection to the rendezvous";
        registry.register("relay_connected", text, self.relay_connected.clone());
        let text = "Bytes of messages that relay streams hold";
        registry.register_with_unit("relay_held", text, Unit::Bytes, self.relay_held.clone());
        registry.register(
            "relay_streams_shed",
            "Relay streams that ended since all together held too much",
            self.relay_shed.clone(),
        );
    }

    /// In the text format of OpenMetrics 1.0, which Prometheus reads.
    pub(crate) fn text(&self) -> String {
        let mut written = String::new();
        // Writing to a string cannot fail; if it did, what is there would be an unfinished scrape, which is refused as such.
        let _unfinished = text::encode(&mut written, &self.registry);
        written
    }

    pub(crate) fn connection(&self, transport: Transport) -> Present {
        let labels = OfTransport { transport: transport.name() };
        self.connections.get_or_create(&labels).inc();
        Present::new(self.connections_active.get_or_create_owned(&labels))
    }

    /// A request came to its end after so long.
    pub(crate) fn request(&self, transport: Transport, method: &'static str, succeeded: bool, took: Duration) {
        let (transport, result) = (transport.name(), if succeeded { "success" } else { "error" });
        self.requests.get_or_create(&OfRequest { transport, method, result }).inc();
        self.request_seconds.get_or_create(&OfMethod { transport, method }).observe(took.as_secs_f64());
    }

    pub(crate) fn process(&self) -> Present {
        Present::new(self.processes_active.clone())
    }

    pub(crate) fn process_ended(&self, end: ProcessEnd, after: Duration) {
        let labels = OfResult { result: end.name() };
        self.processes_finished.get_or_create(&labels).inc();
        self.process_seconds.get_or_create(&labels).observe(after.as_secs_f64());
    }

    /// Helpers are `worker`s or the `spawner`.
    pub(crate) fn helper(&self, role: &'static str) -> Present {
        Present::new(self.helpers_active.get_or_create_owned(&OfRole { role }))
    }

    pub(crate) fn spawner_replaced(&self) {
        self.spawners_replaced.inc();
    }

    pub(crate) fn message(&self, direction: Direction, bytes: usize) {
        let direction = match direction {
            Direction::In => "in",
            Direction::Out => "out",
        };
        self.bytes.get_or_create(&OfDirection { direction }).inc_by(u64::try_from(bytes).unwrap_or(u64::MAX));
    }

    /// What an answer says was denied.
    pub(crate) fn denied(&self, denials: &[Denial]) {
        for denial in denials {
            self.denials.get_or_create(&OfLayer { layer: layer_name(denial.layer) }).inc();
        }
    }

    /// What the sandbox of a process was seen to refuse, what is not listed of it included: only mounts refuse so much.
    pub(crate) fn denied_to_process(&self, Denials { list, more }: &Denials) {
        self.denied(list);
        if *more > 0 {
            self.denials.get_or_create(&OfLayer { layer: layer_name(Layer::Mounts) }).inc_by(*more);
        }
    }

    pub(crate) fn session(&self) -> Present {
        Present::new(self.sessions_active.clone())
    }

    pub(crate) fn detached_session(&self) -> Present {
        Present::new(self.sessions_detached.clone())
    }

    /// There is a connection to the rendezvous for as long as this is.
    pub(crate) fn relay_connected(&self) -> Present {
        Present::new(self.relay_connected.clone())
    }

    /// What messages on relay streams take now, in bytes.
    pub(crate) fn relay_held(&self, bytes: usize) {
        self.relay_held.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    pub(crate) fn relay_shed(&self) {
        self.relay_shed.inc();
    }

    pub(crate) fn refused(&self, reason: Refused) {
        self.refused.get_or_create(&OfReason { reason: reason.name() }).inc();
    }
}

fn layer_name(layer: Layer) -> &'static str {
    match layer {
        Layer::Worker => "worker",
        Layer::Mounts => "mounts",
        Layer::Launcher => "launcher",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_as_they_are_scraped() {
        let metrics = Metrics::new();
        let connection = metrics.connection(Transport::WebSocket);
        metrics.request(Transport::Stdio, "fs/readFile", true, Duration::from_millis(2));
        metrics.process_ended(ProcessEnd::Terminated, Duration::from_secs(2));
        metrics.message(Direction::In, 5);
        metrics.refused(Refused::Auth);
        let worker = metrics.helper("worker");
        let text = metrics.text();
        for line in [
            "exec_server_connections_active{transport=\"websocket\"} 1",
            "exec_server_connections_total{transport=\"websocket\"} 1",
            "exec_server_requests_total{transport=\"stdio\",method=\"fs/readFile\",result=\"success\"} 1",
            "exec_server_request_duration_seconds_bucket{le=\"0.001\",transport=\"stdio\",method=\"fs/readFile\"} 0",
            "exec_server_request_duration_seconds_bucket{le=\"0.0025\",transport=\"stdio\",method=\"fs/readFile\"} 1",
            "exec_server_processes_active 0",
            "exec_server_processes_finished_total{result=\"terminated\"} 1",
            "exec_server_process_duration_seconds_sum{result=\"terminated\"} 2.0",
            "exec_server_helpers_active{role=\"worker\"} 1",
            "exec_server_bytes_total{direction=\"in\"} 5",
            "exec_server_sessions_active 0",
            "exec_server_sessions_detached 0",
            "exec_server_refused_total{reason=\"auth\"} 1",
            "exec_server_relay_held_bytes 0",
            "exec_server_relay_streams_shed_total 0",
            "# EOF",
        ] {
            assert!(text.lines().any(|there| there == line), "{line} is not in\n{text}");
        }
        drop((connection, worker));
        let text = metrics.text();
        assert!(text.contains("exec_server_connections_active{transport=\"websocket\"} 0"), "{text}");
        assert!(text.contains("exec_server_helpers_active{role=\"worker\"} 0"), "{text}");
        assert!(!Metrics::new().text().contains("websocket"), "another gateway has numbers of its own");
    }
}
