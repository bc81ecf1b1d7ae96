//! The server's load in answers, as load balancers that follow ORCA (Open Request Cost Aggregation) read it.

use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::Response;

use crate::observe::Observer;
use crate::types::EngineStats;

/// The routes whose answers have the load, as in vLLM.
const ROUTES: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];
/// The request's header that asks for the load, in one of the formats `TEXT` and `JSON`.
const FORMAT: &str = "endpoint-load-metrics-format";
const LOAD: &str = "endpoint-load-metrics";

/// Adds the load to the answer of a request that asks for it.
pub(in crate::server::http) async fn report_load(
    State(observer): State<Observer>,
    request: Request,
    next: Next,
) -> Response {
    let format = request.headers().get(FORMAT).filter(|_| ROUTES.contains(&request.uri().path())).cloned();
    let mut response = next.run(request).await;
    if let Some(format) = format.filter(|_| response.status().is_success())
        && let Some(load) = written(format.as_bytes(), &observer.metrics.engine())
    {
        response.headers_mut().insert(LOAD, load);
    }
    response
}

/// The load in this format; `None` if it is unknown, which is ignored as in vLLM.
fn written(format: &[u8], stats: &EngineStats) -> Option<HeaderValue> {
    let (usage, waiting) = (stats.kv_cache_usage(), stats.waiting_samples as f64);
    let text = if format.eq_ignore_ascii_case(b"text") {
        format!("TEXT named_metrics.kv_cache_usage_perc={usage:?}, named_metrics.num_requests_waiting={waiting:?}")
    } else if format.eq_ignore_ascii_case(b"json") {
        let metrics = format!(r#"{{"kv_cache_usage_perc": {usage:?}, "num_requests_waiting": {waiting:?}}}"#);
        format!(r#"JSON {{"named_metrics": {metrics}}}"#)
    } else {
        return None;
    };
    HeaderValue::try_from(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_written_as_vllm_writes_it() {
        let stats = EngineStats { total_blocks: 8, free_blocks: 6, waiting_samples: 3, ..EngineStats::default() };
        let text = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0";
        let json = r#"JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}"#;
        for (format, expected) in [("TEXT", Some(text)), ("json", Some(json)), ("BIN", None), ("", None)] {
            let load = written(format.as_bytes(), &stats);
            assert_eq!(load.as_ref().map(|load| load.to_str().unwrap()), expected, "{format}");
        }
    }
}
