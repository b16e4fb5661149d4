//! Export of what is measured by OTLP over HTTP, in its JSON encoding (OpenTelemetry Protocol 1.x), to a collector that the
//! environment names as every exporter has it: `OTEL_EXPORTER_OTLP_ENDPOINT`, or `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` for the whole
//! URL, and `OTEL_METRIC_EXPORT_INTERVAL` in milliseconds. It is the operator's word, so the rule for clients' requests does not hold.
//!
//! What is sent is what a scrape shows; of histograms their sums and counts.

use crate::config::Config;
use crate::http::{Outbound, Request, fetch};
use crate::metrics::Metrics;
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::http::{HttpHeader, HttpRequestParams, RedirectPolicy};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// How often, unless the environment says so.
const EVERY: Duration = Duration::from_secs(60);
/// How long a collector may take, and the last export at the end.
const PATIENCE: Duration = Duration::from_secs(2);

/// The task that exports.
#[derive(Debug)]
pub(crate) struct Exporter {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Exporter {
    pub(crate) fn start(config: Config, metrics: Arc<Metrics>) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(run(config, metrics, stop.clone()));
        Self { stop, task }
    }

    /// Exports once more and ends.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        let _panicked = self.task.await;
    }
}

/// Sends until `stop`, and once more then; nothing at all if no collector is named.
async fn run(config: Config, metrics: Arc<Metrics>, stop: CancellationToken) {
    let Some(url) = endpoint(&config) else { return };
    let outbound = Outbound::new(&Config { egress: None, ceiling: None, ..config.clone() });
    let interval = config.variable("OTEL_METRIC_EXPORT_INTERVAL").and_then(|text| text.to_str()?.parse().ok());
    let every = interval.filter(|ms: &u64| *ms > 0).map_or(EVERY, Duration::from_millis);
    let began = SystemTime::now();
    let mut has_failed = false;
    loop {
        let is_last = tokio::select! {
            () = sleep(every) => false,
            () = stop.cancelled() => true,
        };
        let body = encode(&metrics.text(), began, SystemTime::now()).to_string();
        let sent = timeout(PATIENCE, send(&outbound, &url, body)).await.unwrap_or_else(|_| Err("it took too long".to_owned()));
        match sent {
            Ok(()) => has_failed = false,
            // Said once, and again when it worked in between.
            Err(error) if !has_failed => {
                tracing::warn!("export metrics by OTLP: {error}");
                has_failed = true;
            }
            Err(_again) => {}
        }
        if is_last {
            return;
        }
    }
}

fn endpoint(config: &Config) -> Option<String> {
    let named = |name: &str| config.variable(name)?.to_str().filter(|text| !text.is_empty()).map(str::to_owned);
    named("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
        .or_else(|| Some(format!("{}/v1/metrics", named("OTEL_EXPORTER_OTLP_ENDPOINT")?.trim_end_matches('/'))))
}

async fn send(outbound: &Outbound, url: &str, body: String) -> Result<(), String> {
    let json = HttpHeader { name: "content-type".to_owned(), value: "application/json".to_owned(), value_env_var: None };
    let params = HttpRequestParams {
        method: "POST".to_owned(),
        url: url.to_owned(),
        headers: vec![json],
        body: Some(Chunk(body.into_bytes())),
        timeout_ms: None,
        redirect_policy: RedirectPolicy::Stop,
        request_id: String::new(),
        stream_response: false,
    };
    let request = Request::new(params, &[]).map_err(|error| error.message)?;
    let (status, _headers) = fetch(outbound, request).await.map_err(|error| error.message)?.head();
    if (200..300).contains(&status) { Ok(()) } else { Err(format!("the collector answered {status}")) }
}

/// A scrape as a request of OTLP.
fn encode(scrape: &str, began: SystemTime, now: SystemTime) -> Value {
    let kinds: HashMap<&str, &str> = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    let mut points: BTreeMap<&str, (bool, Vec<Value>)> = BTreeMap::new();
    for line in scrape.lines().filter(|line| !line.starts_with('#')) {
        let Some((head, value)) = line.rsplit_once(' ') else { continue };
        let (name, labels) = head.split_once('{').unwrap_or((head, ""));
        let is_sum = match ["_total", "_sum", "_count"].iter().find_map(|end| kinds.get(name.strip_suffix(end)?)) {
            Some(&("counter" | "histogram")) => true,
            _ if kinds.get(name) == Some(&"gauge") => false,
            _ => continue,
        };
        let Ok(value) = value.parse::<f64>() else { continue };
        let labels = labels.trim_end_matches('}').split("\",").filter_map(|label| label.split_once("=\""));
        let attributes: Vec<Value> =
            labels.map(|(key, text)| json!({"key": key, "value": {"stringValue": text.trim_end_matches('"')}})).collect();
        let mut point = json!({"attributes": attributes, "timeUnixNano": nanos(now), "asDouble": value});
        if is_sum {
            point["startTimeUnixNano"] = nanos(began).into();
        }
        points.entry(name).or_insert_with(|| (is_sum, Vec::new())).1.push(point);
    }
    let metrics: Vec<Value> = points
        .into_iter()
        .map(|(name, (is_sum, points))| {
            if is_sum {
                // 2 is cumulative.
                json!({"name": name, "sum": {"aggregationTemporality": 2, "isMonotonic": true, "dataPoints": points}})
            } else {
                json!({"name": name, "gauge": {"dataPoints": points}})
            }
        })
        .collect();
    let service = json!([{"key": "service.name", "value": {"stringValue": "portcullis"}}]);
    json!({"resourceMetrics": [{"resource": {"attributes": service}, "scopeMetrics": [{"scope": {"name": "portcullis"}, "metrics": metrics}]}]})
}

fn nanos(time: SystemTime) -> String {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caller::Transport;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_collector_gets_what_a_scrape_shows() {
        let collector = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let metrics = Arc::new(Metrics::new());
        let _present = metrics.connection(Transport::WebSocket);
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}/", collector.local_addr().unwrap())),
            ("OTEL_METRIC_EXPORT_INTERVAL", "3600000".to_owned()),
        ];
        let environment = variables.iter().map(|(name, value)| ((*name).into(), value.into())).collect();
        let exporter = Exporter::start(Config { environment, ..Config::bare() }, metrics);
        let exporting = tokio::spawn(exporter.stop());
        let (mut socket, _peer) = collector.accept().await.unwrap();
        let mut asked = Vec::new();
        let body = loop {
            let mut part = [0; 4096];
            let length = socket.read(&mut part).await.unwrap();
            asked.extend_from_slice(&part[..length]);
            let text = String::from_utf8_lossy(&asked);
            if let Some((_head, body)) = text.split_once("\r\n\r\n")
                && let Ok(body) = serde_json::from_str::<Value>(body)
            {
                break body;
            }
        };
        socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
        exporting.await.unwrap();
        assert!(asked.starts_with(b"POST /v1/metrics HTTP/1.1\r\n"));
        let all = &body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"];
        let find = |name: &str| all.as_array().unwrap().iter().find(|metric| metric["name"] == name).unwrap().clone();
        let active = find("exec_server_connections_active");
        assert_eq!(active["gauge"]["dataPoints"][0]["asDouble"], 1.0);
        let label = json!([{"key": "transport", "value": {"stringValue": "websocket"}}]);
        assert_eq!(active["gauge"]["dataPoints"][0]["attributes"], label);
        assert_eq!(find("exec_server_connections_total")["sum"]["isMonotonic"], true);
    }

    #[tokio::test]
    async fn without_a_collector_nothing_is_sent() {
        run(Config::bare(), Arc::new(Metrics::new()), CancellationToken::new()).await;
    }
}
