//! What the laws look at in replies.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::support::{Client, Reply, eventually};

/// The ttl of a lease that is to run out, in milliseconds. A store whose disk is busy for longer
/// than that has nothing left of the lease to tell of.
pub(crate) const BRIEF: i64 = 300;

/// Fails if there is a `null` anywhere: what is absent is left out.
#[track_caller]
pub(crate) fn no_nulls(value: &Value) {
    match value {
        Value::Null => panic!("a null member"),
        Value::Array(items) => items.iter().for_each(no_nulls),
        Value::Object(members) => members.values().for_each(no_nulls),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The text of a header, or nothing.
pub(crate) fn header<'a>(reply: &'a Reply, name: &str) -> &'a str {
    reply.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Fails unless this is a whole problem with this status and code.
#[track_caller]
pub(crate) fn problem(reply: &Reply, status: u16, code: &str) {
    assert_eq!((reply.status, reply.outcome()), (status, code), "{reply:#?}");
    assert_eq!(header(reply, "content-type"), "application/problem+json");
    assert_eq!(header(reply, "cache-control"), "no-store");
    no_nulls(&reply.body);
    let members = reply.body.as_object().unwrap();
    for name in ["type", "title", "detail", "code", "request_id"] {
        assert!(members[name].as_str().is_some_and(|text| !text.is_empty()), "{name}: {reply:#?}");
    }
    assert_eq!(members["status"], status);
    assert_eq!(members["request_id"], header(reply, "x-request-id"));
    let may_be_repeated = matches!(status, 429 | 503);
    assert_eq!(members["retryable"], may_be_repeated, "{reply:#?}");
    let retry_after = header(reply, "retry-after");
    if may_be_repeated {
        assert!(retry_after.parse::<u32>().is_ok_and(|seconds| seconds >= 1), "{reply:#?}");
    } else {
        assert_eq!(retry_after, "");
    }
    let known = [
        "type",
        "title",
        "status",
        "detail",
        "code",
        "retryable",
        "request_id",
        "reason",
        "retry_after_ms",
        "limit",
        "errors",
        "current",
    ];
    for name in members.keys() {
        assert!(known.contains(&&**name), "{name} is not a member of a problem");
    }
}

/// The members that a 400 `invalid_request` complains of, in order.
#[track_caller]
pub(crate) fn wrong_members(reply: &Reply) -> Vec<String> {
    problem(reply, 400, "invalid_request");
    let errors = reply.body["errors"].as_array().unwrap();
    for error in errors {
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{reply:#?}");
    }
    errors.iter().map(|error| error["field"].as_str().unwrap().to_owned()).collect()
}

/// The Unix time in milliseconds of an instant as replies spell it, and only so.
#[track_caller]
pub(crate) fn millis(instant: &Value) -> i64 {
    let text = instant.as_str().unwrap_or_else(|| panic!("not an instant: {instant}"));
    let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    assert_eq!(shape, "0000-00-00T00:00:00.000Z", "{text}");
    let part = |from: usize, to: usize| text[from..to].parse::<i64>().unwrap();
    let (year, month, day) = (part(0, 4), part(5, 7), part(8, 10));
    // Days since the epoch, by the civil calendar with years that begin in March.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719_468;
    (((days * 24 + part(11, 13)) * 60 + part(14, 16)) * 60 + part(17, 19)) * 1_000 + part(20, 23)
}

/// Waits until a lease's time is over by the store's clock, without anybody having been told that
/// this one is: unlike after a `wait`, its end is not written yet.
pub(crate) async fn until_lapsed(client: &Client, key: &str) {
    eventually(|| async {
        let page = client.get_with("/v1/leases", &[("prefix", key), ("state", "free")]).await;
        page.body["items"].as_array().unwrap().iter().any(|item| item["key"] == key)
    })
    .await;
}

/// Claims as a caller that gives the body.
pub(crate) async fn claim(client: &Client, body: Value) -> Reply {
    client.post("/v1/leases/claim", body).await
}

/// Frees a key by force.
pub(crate) async fn force(client: &Client, key: &str, version: Option<i64>) -> Reply {
    let body = json!({"key": key, "reason": "a test", "version": version});
    client.post("/v1/leases/force-release", body).await
}

/// The limit of that name.
pub(crate) async fn limit(client: &Client, name: &str) -> usize {
    let capabilities = client.get("/v1/capabilities").await.body;
    let limit = capabilities["limits"][name].as_u64();
    limit.and_then(|n| usize::try_from(n).ok()).unwrap_or_else(|| panic!("no limit {name}"))
}

/// Text of so many bytes that no compression shortens, the same in each run. `alphabet` gives the
/// characters; what does not fit at the end is filled up with `x`.
pub(crate) fn random_text(bytes: usize, alphabet: &str) -> String {
    let characters: Vec<char> = alphabet.chars().collect();
    let mut text = String::new();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    loop {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let index = usize::try_from(state >> 33).unwrap() % characters.len();
        if text.len() + characters[index].len_utf8() > bytes {
            return text.clone() + &"x".repeat(bytes - text.len());
        }
        text.push(characters[index]);
    }
}

/// The names of an object's members, in the order of the alphabet.
#[track_caller]
pub(crate) fn names(value: &Value) -> Vec<&str> {
    let members = value.as_object().unwrap_or_else(|| panic!("not an object: {value}"));
    let mut names: Vec<&str> = members.keys().map(|name| &**name).collect();
    names.sort_unstable();
    names
}

/// A member of a reply as it stands in its text.
#[track_caller]
pub(crate) fn text_of(reply: &Reply, name: &str) -> String {
    let members: BTreeMap<String, Box<RawValue>> = serde_json::from_str(&reply.text).unwrap();
    members.get(name).unwrap_or_else(|| panic!("no {name}: {}", reply.text)).get().to_owned()
}

/// What a state says, without what time alone changes.
pub(crate) fn at_rest(mut state: Value) -> Value {
    state.as_object_mut().unwrap().remove("expires_in_ms");
    state
}

/// How often something was written to the store.
pub(crate) async fn writes(client: &Client) -> f64 {
    let name = "fencepost_store_call_duration_seconds_count{operation=\"store\"}";
    Some(client.metric(name).await).filter(|count| !count.is_nan()).unwrap_or(0.0)
}

#[test]
fn instants_are_read_right() {
    assert_eq!(millis(&json!("1970-01-01T00:00:00.001Z")), 1);
    assert_eq!(millis(&json!("2024-02-29T12:34:56.789Z")), 1_709_210_096_789);
    assert_eq!(millis(&json!("2026-11-30T12:00:00.000Z")), 1_796_040_000_000);
}
