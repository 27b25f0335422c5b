//! Stored responses: who does a write, and what everybody else is told of it, to the byte.

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fencepost::coordinator::CoordinatorOptions;
use fencepost::domain::time::Retention;
use serde_json::{Value, json};
use tokio::task::{JoinHandle, JoinSet};

use crate::check::{
    BRIEF, at_rest, limit, millis, names, no_nulls, problem, writes, wrong_members,
};
use crate::on_every_store;
use crate::reads::ODD_KEYS;
use crate::support::process::Process;
use crate::support::{Client, Kind, Reply, Service, World, eventually};
use crate::wire::{exchange, post_chunked};

/// Longer than what is told at once takes on a busy machine, and far shorter than any wait here.
const PROMPT: Duration = Duration::from_secs(20);

const ATTEMPT: &str = "0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00";

/// Adds or replaces members.
fn with(mut body: Value, members: &Value) -> Value {
    for (name, value) in members.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn wish(key: &str, owner: &str, ttl_ms: i64) -> Value {
    json!({"key": key, "owner_id": owner, "ttl_ms": ttl_ms})
}

async fn ask(client: &Client, body: Value) -> Reply {
    client.post("/v1/idempotency/claim", body).await
}

async fn claim(client: &Client, key: &str, owner: &str, ttl_ms: i64) -> Reply {
    ask(client, wish(key, owner, ttl_ms)).await
}

async fn claim_for(client: &Client, key: &str, fingerprint: &str, ttl_ms: i64) -> Reply {
    ask(client, with(wish(key, "a", ttl_ms), &json!({"fingerprint": fingerprint}))).await
}

/// A claim that waits, on its way.
fn attach(client: &Client, key: &str, owner: &str, wait_ms: i64) -> JoinHandle<Reply> {
    let body = with(wish(key, owner, 60_000), &json!({"wait_ms": wait_ms}));
    let client = client.clone();
    tokio::spawn(async move { ask(&client, body).await })
}

fn reference(key: &str, owner: &str, version: i64) -> Value {
    json!({"key": key, "owner_id": owner, "version": version})
}

async fn complete(client: &Client, key: &str, owner: &str, version: i64, record: &Value) -> Reply {
    let body = with(reference(key, owner, version), &json!({"record": record}));
    client.post("/v1/idempotency/complete", body).await
}

async fn renew(client: &Client, key: &str, owner: &str, version: i64) -> Reply {
    client.post("/v1/idempotency/renew", reference(key, owner, version)).await
}

async fn release(client: &Client, key: &str, owner: &str, version: i64) -> Reply {
    client.post("/v1/idempotency/release", reference(key, owner, version)).await
}

async fn force(client: &Client, key: &str, version: Option<i64>) -> Reply {
    let body = json!({"key": key, "reason": "a test", "version": version});
    client.post("/v1/idempotency/force-release", body).await
}

async fn put(client: &Client, key: &str, record: &Value) -> Reply {
    client.put("/v1/idempotency/record", json!({"key": key, "record": record})).await
}

async fn get(client: &Client, key: &str) -> Reply {
    client.get_with("/v1/idempotency/record", &[("key", key)]).await
}

async fn delete(client: &Client, key: &str) -> Reply {
    client.delete_with("/v1/idempotency/record", &[("key", key)]).await
}

async fn look(client: &Client, key: &str) -> Value {
    client.get_with("/v1/idempotency/state", &[("key", key)]).await.body
}

/// All that is known of a key, without what time alone changes.
async fn standing(client: &Client, key: &str) -> (Value, Value) {
    (at_rest(look(client, key).await), at_rest(get(client, key).await.body))
}

/// Waits until the time of a claim is over by the store's clock, which nobody is told thereby.
async fn until_lapsed(client: &Client, key: &str) {
    // A list goes by the store's own time; a state is told a little later than that.
    eventually(|| async {
        let page = client.get_with("/v1/idempotency", &[("prefix", key)]).await.body;
        let mut items = page["items"].as_array().unwrap().iter();
        items.any(|item| item["key"] == key && item["reclaimable"] == true)
    })
    .await;
}

/// Fails unless a call is refused and leaves no trace.
async fn refused<F: Future<Output = Reply>>(client: &Client, key: &str, call: F) -> Reply {
    let (before, written) = (standing(client, key).await, writes(client).await);
    let reply = call.await;
    assert!(matches!(reply.status, 400 | 409 | 413), "{reply:#?}");
    assert_eq!(standing(client, key).await, before);
    assert_eq!(writes(client).await, written, "a refusal wrote something");
    reply
}

/// The state of what is there instead, as a 409 tells it.
fn current(reply: &Reply) -> &str {
    reply.body["current"]["state"].as_str().unwrap_or_default()
}

/// A response that uses every member.
fn whole() -> Value {
    json!({
        "status": 201,
        "content_type": "application/json; charset=utf-8",
        "headers": [["location", "/orders/7"], ["Set-Cookie", "a=1"], ["set-cookie", "b=2"]],
        "body_base64": STANDARD.encode(br#"{"id":7}"#),
    })
}

fn of_bytes(bytes: &[u8]) -> Value {
    json!({"status": 200, "body_base64": STANDARD.encode(bytes)})
}

/// Stores a response by claim and completion.
async fn store(client: &Client, key: &str, record: &Value) -> i64 {
    let version = claim(client, key, "a", 60_000).await.expect("claimed").version();
    complete(client, key, "a", version, record).await.expect("completed");
    version
}

/// Fails unless everybody is given exactly this response.
async fn replays(client: &Client, key: &str, record: &Value) {
    let told = claim(client, key, "z", 60_000).await.expect("completed");
    assert_eq!(told.body["record"], *record);
    let found = get(client, key).await.expect("found");
    assert_eq!(found.body["record"], *record);
}

/// The keys of a list.
async fn list(client: &Client, query: &[(&str, &str)]) -> Vec<String> {
    let mut keys = Vec::new();
    let mut token: Option<String> = None;
    loop {
        let mut query = query.to_vec();
        query.extend(token.as_deref().map(|token| ("page_token", token)));
        let page = client.get_with("/v1/idempotency", &query).await;
        assert_eq!(page.status, 200, "{page:#?}");
        no_nulls(&page.body);
        let items = page.body["items"].as_array().unwrap();
        keys.extend(items.iter().map(|item| item["key"].as_str().unwrap().to_owned()));
        token = page.body.get("next_page_token").map(|token| token.as_str().unwrap().to_owned());
        if token.is_none() {
            return keys;
        }
    }
}

on_every_store! {
    async fn a_response_that_is_put_is_found_until_it_is_deleted(service) {
        assert_eq!(get(&service, "k").await.body, json!({"outcome": "absent"}));
        assert_eq!(delete(&service, "k").await.expect("absent").body, json!({"outcome": "absent"}));
        let stored = put(&service, "k", &whole()).await.expect("stored");
        assert_eq!(names(&stored.body),
                   ["expires_at", "expires_in_ms", "outcome", "stored_at", "version"]);
        let found = get(&service, "k").await.expect("found");
        assert!(found.text.starts_with(r#"{"outcome":"found","#), "{}", found.text);
        assert_eq!(names(&found.body),
                   ["expires_at", "expires_in_ms", "outcome", "record", "stored_at"]);
        assert_eq!(found.body["record"], whole());
        for name in ["stored_at", "expires_at"] {
            assert_eq!(found.body[name], stored.body[name], "{name}");
        }
        let kept = millis(&found.body["expires_at"]) - millis(&found.body["stored_at"]);
        assert_eq!(kept, 86_400_000);
        assert_eq!(delete(&service, "k").await.expect("deleted").body, json!({"outcome": "deleted"}));
        delete(&service, "k").await.expect("absent");
        get(&service, "k").await.expect("absent");
        assert_eq!(look(&service, "k").await["state"], "absent");
        assert_eq!(list(&service, &[]).await, [""; 0]);
        let version = stored.body["version"].as_i64().unwrap();
        assert!(claim(&service, "k", "a", 60_000).await.expect("claimed").version() > version);
    }

    async fn a_new_write_is_claimed_and_told_in_full(service) {
        let granted = claim(&service, "k", "a", 30_000).await.expect("claimed");
        assert!(granted.text.starts_with(r#"{"outcome":"claimed","#), "{}", granted.text);
        no_nulls(&granted.body);
        assert_eq!(names(&granted.body), ["elapsed_ms", "lease", "outcome", "repeated"]);
        let lease = &granted.body["lease"];
        assert_eq!(names(lease), ["acquired_at", "expires_at", "expires_in_ms", "key", "owner_id",
                                  "renew_after_ms", "ttl_ms", "version"]);
        assert_eq!(lease["renew_after_ms"], 10_000);
        let scoped = ask(&service, with(wish("k", "a", 30_000), &json!({"scope": "s"}))).await;
        assert_eq!(scoped.expect("claimed").body["lease"]["scope"], "s");
        let plain = ask(&service, json!({"key": "l", "owner_id": "a"})).await.expect("claimed");
        assert_eq!(plain.body["lease"]["ttl_ms"], 30_000);
        get(&service, "k").await.expect("absent");
        let told = claim(&service, "k", "b", 60_000).await.expect("already_in_progress");
        assert_eq!(names(&told.body), ["elapsed_ms", "holder", "outcome", "retry_after_ms"]);
        for name in ["owner_id", "version", "acquired_at", "expires_at"] {
            assert_eq!(told.body["holder"][name], lease[name], "{name}");
        }
        claim(&service, "k", "a", 60_000).await.expect("already_in_progress");
    }

    async fn a_completed_write_is_told_with_its_response(service) {
        let version = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        let done = complete(&service, "k", "a", version, &whole()).await.expect("completed");
        assert_eq!(done.body, json!({"outcome": "completed"}));
        for owner in ["a", "b"] {
            let told = claim(&service, "k", owner, 60_000).await.expect("completed");
            assert_eq!(names(&told.body), ["elapsed_ms", "expires_at", "expires_in_ms", "outcome",
                                           "record", "stored_at", "version"]);
            assert_eq!((&told.body["record"], &told.body["version"]), (&whole(), &json!(version)));
        }
        replays(&service, "k", &whole()).await;
    }

    /// Two callers whose names run together must not meet (`devlink#773`, `titen#37`).
    async fn a_scope_is_a_part_of_the_identity(service) {
        let pairs = [("", "k"), ("a", "b:c"), ("a:b", "c"), ("ab", "c"), ("a", "bc"), (" ", "k"),
                     ("k", "k"), ("A", "b:c"), ("a", "b"), ("\u{e9}", "k"), ("e\u{301}", "k")];
        let mut versions = Vec::new();
        for (scope, key) in pairs {
            let body = with(wish(key, "a", 60_000), &json!({"scope": scope, "fingerprint": scope}));
            let body = if scope.is_empty() { wish(key, "a", 60_000) } else { body };
            versions.push(ask(&service, body).await.expect("claimed").version());
        }
        for ((scope, key), version) in pairs.into_iter().zip(versions) {
            let record = json!({"status": 200, "headers": [["x", "1"]],
                                "body_base64": STANDARD.encode(format!("{scope}/{key}"))});
            let members = json!({"scope": scope, "record": record});
            let body = with(reference(key, "a", version), &members);
            service.post("/v1/idempotency/complete", body).await.expect("completed");
        }
        for (scope, key) in pairs {
            let query = [("key", key), ("scope", scope)];
            let found = service.get_with("/v1/idempotency/record", &query).await.expect("found");
            let body = STANDARD.encode(format!("{scope}/{key}"));
            assert_eq!(found.body["record"]["body_base64"], body);
        }
        // No scope and the empty one are the same.
        replays(&service, "k", &get(&service, "k").await.body["record"]).await;
        let query = [("key", "b:c"), ("scope", "a")];
        service.delete_with("/v1/idempotency/record", &query).await.expect("deleted");
        let query = [("key", "c"), ("scope", "a:b")];
        service.get_with("/v1/idempotency/record", &query).await.expect("found");
    }

    async fn keys_and_scopes_are_compared_byte_by_byte(service) {
        let pairs: Vec<_> = ODD_KEYS.iter().zip(ODD_KEYS.iter().cycle().skip(1)).collect();
        for (scope, key) in &pairs {
            let body = json!({"key": key, "scope": scope, "record": of_bytes(key.as_bytes())});
            service.put("/v1/idempotency/record", body).await.expect("stored");
        }
        for (scope, key) in &pairs {
            let query = [("key", **key), ("scope", **scope)];
            let found = service.get_with("/v1/idempotency/record", &query).await.expect("found");
            assert_eq!(found.body["record"], of_bytes(key.as_bytes()), "{scope} {key}");
            assert_eq!(list(&service, &[("scope", scope)]).await, [**key]);
        }
    }

    async fn headers_are_kept_in_order_with_repeats_and_every_octet(service) {
        let all: String = ('\u{1}'..='\u{ff}').filter(|c| !matches!(c, '\r' | '\n')).collect();
        let record = json!({
            "status": 200,
            "headers": [
                ["z", "1"], ["a", ""], ["z", "1"], ["Z", " padded \t"], ["!#$%&'*+-.^_`|~09aZ", "\""],
                ["x", "caf\u{e9} \u{80}\u{ff}"], ["x", all], ["content-length", "5"],
                ["content-encoding", "gzip"], ["content-type-x", "y"],
            ],
        });
        store(&service, "k", &record).await;
        replays(&service, "k", &record).await;
        let typed = json!({"status": 200, "content_type": "text/plain; charset=\u{e9}"});
        store(&service, "l", &typed).await;
        replays(&service, "l", &typed).await;
        let empty = json!({"status": 200, "content_type": ""});
        store(&service, "m", &empty).await;
        replays(&service, "m", &empty).await;
    }

    async fn headers_that_no_response_can_have_are_refused(service) {
        let version = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        let of = |headers: Value| json!({"status": 200, "headers": headers});
        for value in ["a\rb", "a\nb", "\0", "a\r\nset-cookie: b", "\u{100}", "\u{2028}", "😀"] {
            let record = of(json!([["x", value]]));
            let call = complete(&service, "k", "a", version, &record);
            let reply = refused(&service, "k", call).await;
            assert_eq!(wrong_members(&reply), ["record.headers"], "{value:?}");
            let record = json!({"status": 200, "content_type": value});
            let reply = refused(&service, "k", complete(&service, "k", "a", version, &record)).await;
            assert_eq!(wrong_members(&reply), ["record.content_type"], "{value:?}");
        }
        for name in ["content-type", "Content-Type", "CONTENT-TYPE", "", " x", "x ", "x y", "x:", "é",
                     "x\n", "x\0", "(x)", "x,y"] {
            let reply = put(&service, "l", &of(json!([["ok", "1"], [name, "1"]]))).await;
            assert_eq!(wrong_members(&reply), ["record.headers"], "{name:?}");
        }
        for wrong in [json!({}), json!("x"), json!([["x"]]), json!([["x", "y", "z"]]), json!([["x", 1]]),
                      json!([["x", null]]), json!([{"x": "y"}]), json!([[1, "x"]]), json!([null])] {
            let reply = put(&service, "l", &of(wrong.clone())).await;
            assert_eq!(wrong_members(&reply), ["record.headers"], "{wrong}");
        }
        get(&service, "l").await.expect("absent");
    }

    async fn headers_have_limits(service) {
        assert_eq!(limit(&service, "headers").await, 200);
        assert_eq!(limit(&service, "headers_bytes").await, 32 << 10);
        let many = |n: usize| json!({"status": 200, "headers": vec![json!(["x", "1"]); n]});
        store(&service, "many", &many(200)).await;
        replays(&service, "many", &many(200)).await;
        // Each octet counts as one, however many bytes its character takes.
        for c in ["x", "\u{e9}"] {
            let large = |n: usize| json!({"status": 200, "headers": [["h", c.repeat(n)]]});
            let key = format!("large {c}");
            store(&service, &key, &large((32 << 10) - 1)).await;
            replays(&service, &key, &large((32 << 10) - 1)).await;
            let reply = put(&service, "over", &large(32 << 10)).await;
            assert_eq!(wrong_members(&reply), ["record.headers"]);
        }
        assert_eq!(wrong_members(&put(&service, "over", &many(201)).await), ["record.headers"]);
        get(&service, "over").await.expect("absent");
    }

    /// Whether a failure is worth a replay is for the caller to decide (`remitlend#1329`,
    /// `ietf-wg-httpapi/idempotency#41`); a replay does not change it (`IdempotentAPI#39`).
    async fn every_final_status_is_kept_as_it_is(service) {
        for status in [200, 201, 202, 204, 205, 206, 299, 301, 304, 399, 400, 406, 409, 418, 422, 429,
                       499, 500, 503, 599] {
            let record = json!({"status": status, "body_base64": STANDARD.encode(b"kept")});
            let key = status.to_string();
            store(&service, &key, &record).await;
            replays(&service, &key, &record).await;
        }
    }

    async fn what_is_no_final_status_is_refused(service) {
        let version = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        for status in [json!(0), json!(99), json!(100), json!(199), json!(600), json!(-1), json!(-200),
                       json!(65_736), json!(200.0), json!("200"), json!(true), json!([200])] {
            let record = json!({"status": status});
            let reply = refused(&service, "k", complete(&service, "k", "a", version, &record)).await;
            assert_eq!(wrong_members(&reply), ["record.status"], "{status}");
            assert_eq!(wrong_members(&put(&service, "l", &record).await), ["record.status"]);
        }
        for (record, wrong) in [
            (json!({}), "record.status"), (json!({"status": null}), "record.status"),
            (json!({"status": 200, "body": ""}), "record.body"),
            (json!({"status": 200, "scope": ""}), "record.scope"),
            (json!(null), "record"), (json!([]), "record"), (json!("x"), "record"),
        ] {
            assert_eq!(wrong_members(&put(&service, "l", &record).await), [wrong], "{record}");
        }
        let twice = r#"{"key":"l","record":{"status":200,"status":201},"owner_id":"a","version":1}"#;
        let reply = service.post_raw("/v1/idempotency/complete", twice).await;
        assert_eq!(wrong_members(&reply), ["record.status"]);
        get(&service, "l").await.expect("absent");
    }

    /// An empty body breaks a JSON column (`one_day_delivery#61`).
    async fn no_body_an_empty_one_null_and_a_space_are_four_things(service) {
        let records = [json!({"status": 200}), of_bytes(b""), of_bytes(b"null"), of_bytes(b" ")];
        for (n, record) in records.iter().enumerate() {
            let key = format!("k{n}");
            let version = store(&service, &key, record).await;
            replays(&service, &key, record).await;
            for other in records.iter().filter(|other| *other != record) {
                let reply = complete(&service, &key, "a", version, other).await;
                problem(&reply, 409, "already_completed");
            }
        }
        // What is null is left out.
        let nulls = json!({"status": 200, "body_base64": null, "content_type": null, "headers": null});
        put(&service, "nulls", &nulls).await.expect("stored");
        replays(&service, "nulls", &json!({"status": 200})).await;
    }

    /// Binary, compressed or broken text comes back to the byte (`attestix#128`, `arcadedb#5174`,
    /// `honeyryderchuck/httpx#109`).
    async fn every_byte_of_a_body_survives(service) {
        let all: Vec<u8> = (0..=255).collect();
        let gzip = [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 0xab, 0, 0x83, 0x16][..],
                    &[0xdc, 0x8c, 1, 0, 0, 0]].concat();
        let json = br#"{"z":1,  "a":1.0,"a":2,"n":1E400,"b":12345678901234567890,"s":"\u00e9\/"}"#;
        let bodies: [&[u8]; 12] = [
            &all, &gzip, json, b"\xc3\x28", b"\xef\xbb\xbf{}", b"a\r\nb\rc\n", b"\0", b"\0\0\0", b"\xff",
            b"\xed\xa0\x80", b"\\x00", "\u{1f600}".as_bytes(),
        ];
        for (n, body) in bodies.into_iter().enumerate() {
            let key = format!("k{n}");
            let mut record = of_bytes(body);
            record["headers"] = json!([["content-encoding", "gzip"]]);
            let version = store(&service, &key, &record).await;
            replays(&service, &key, &record).await;
            complete(&service, &key, "a", version, &record).await.expect("completed");
        }
    }

    async fn the_largest_body_is_kept_and_a_larger_one_changes_nothing(service) {
        let most = limit(&service, "body_bytes").await;
        assert_eq!(most, 1 << 20);
        let mut state = 1_u64;
        let bytes: Vec<u8> = (0..=most).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        }).collect();
        let version = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        let over = of_bytes(&bytes);
        let reply = refused(&service, "k", complete(&service, "k", "a", version, &over)).await;
        problem(&reply, 413, "payload_too_large");
        assert_eq!(reply.body["limit"], "body_bytes");
        problem(&put(&service, "l", &over).await, 413, "payload_too_large");
        // So large that it is not read to its end.
        let members = json!({"record": of_bytes(&bytes.repeat(3))});
        let body = with(reference("k", "a", version), &members).to_string();
        let request = post_chunked("/v1/idempotency/complete", body.as_bytes(), 60_000);
        let reply = exchange(&service.base, request).await;
        assert!(matches!(reply.status, 413 | 0), "{}", reply.head);
        get(&service, "l").await.expect("absent");
        claim(&service, "k", "b", 60_000).await.expect("already_in_progress");
        // With as many headers as there may be, each octet in its longest spelling.
        let mut record = of_bytes(&bytes[..most]);
        record["headers"] = json!([["h", "\u{80}".repeat((32 << 10) - 1)]]);
        let body = with(reference("k", "a", version), &json!({"record": record}));
        let spelt = body.to_string().replace('\u{80}', "\\u0080");
        service.post_raw("/v1/idempotency/complete", spelt).await.expect("completed");
        let told = claim(&service, "k", "b", 60_000).await.expect("completed");
        assert!(told.body["record"] == record, "the largest response came back changed");
        assert!(get(&service, "k").await.body["record"] == record);
    }

    async fn a_body_must_be_padded_base64(service) {
        for text in ["=", "A", "AA", "AAA", "AA=", "AA==A", "AA===", "AB==", "-_==", "QQ==\n", " QQ==", "é",
                     "A\u{0}=="] {
            let record = json!({"status": 200, "body_base64": text});
            let reply = put(&service, "k", &record).await;
            assert_eq!(wrong_members(&reply), ["record.body_base64"], "{text:?}");
        }
        for wrong in [json!(1), json!([65]), json!({})] {
            let record = json!({"status": 200, "body_base64": wrong});
            assert_eq!(wrong_members(&put(&service, "k", &record).await), ["record.body_base64"]);
        }
        get(&service, "k").await.expect("absent");
    }

    async fn another_fingerprint_is_a_mismatch_in_every_state(service) {
        let mismatches = async |what: &str| {
            let written = writes(&service).await;
            for other in ["g", "F", "f ", "\u{ff46}"] {
                let told = claim_for(&service, "k", other, 60_000).await;
                let told = told.expect("fingerprint_mismatch");
                assert_eq!(names(&told.body), ["elapsed_ms", "outcome"], "{what}");
            }
            assert_eq!(writes(&service).await, written, "{what}");
        };
        claim_for(&service, "k", "f", BRIEF).await.expect("claimed");
        mismatches("in progress").await;
        claim_for(&service, "k", "f", 60_000).await.expect("already_in_progress");
        until_lapsed(&service, "k").await;
        mismatches("lapsed").await;
        let second = claim_for(&service, "k", "f", 60_000).await.expect("claimed");
        assert_eq!(second.body["recovered"], true);
        complete(&service, "k", "a", second.version(), &whole()).await.expect("completed");
        mismatches("completed").await;
        claim_for(&service, "k", "f", 60_000).await.expect("completed");
    }

    async fn fingerprints_are_compared_only_when_both_sides_have_one(service) {
        claim_for(&service, "k", "f", 60_000).await.expect("claimed");
        claim(&service, "k", "b", 60_000).await.expect("already_in_progress");
        claim(&service, "l", "a", BRIEF).await.expect("claimed");
        claim_for(&service, "l", "f", 60_000).await.expect("already_in_progress");
        claim_for(&service, "l", "g", 60_000).await.expect("already_in_progress");
        // Whoever takes over says what it is from then on; whoever says nothing changes nothing.
        until_lapsed(&service, "l").await;
        claim_for(&service, "l", "f", BRIEF).await.expect("claimed");
        claim_for(&service, "l", "g", 60_000).await.expect("fingerprint_mismatch");
        until_lapsed(&service, "l").await;
        let version = claim(&service, "l", "b", 60_000).await.expect("claimed").version();
        claim_for(&service, "l", "g", 60_000).await.expect("fingerprint_mismatch");
        complete(&service, "l", "b", version, &whole()).await.expect("completed");
        claim_for(&service, "l", "g", 60_000).await.expect("fingerprint_mismatch");
        claim(&service, "l", "c", 60_000).await.expect("completed");
        for wrong in [json!(""), json!("f".repeat(513)), json!("a\nb"), json!(1)] {
            let body = with(wish("m", "a", 60_000), &json!({"fingerprint": wrong}));
            assert_eq!(wrong_members(&ask(&service, body).await), ["fingerprint"]);
        }
    }

    async fn a_release_forgets_the_fingerprint_and_a_put_has_none(service) {
        let first = claim_for(&service, "k", "f", 60_000).await.expect("claimed").version();
        release(&service, "k", "a", first).await.expect("released");
        assert_eq!(look(&service, "k").await.get("fingerprint"), None);
        let second = claim_for(&service, "k", "g", 60_000).await.expect("claimed").version();
        claim_for(&service, "k", "f", 60_000).await.expect("fingerprint_mismatch");
        complete(&service, "k", "a", second, &whole()).await.expect("completed");
        put(&service, "k", &of_bytes(b"put")).await.expect("stored");
        for fingerprint in ["f", "g", "h"] {
            let told = claim_for(&service, "k", fingerprint, 60_000).await.expect("completed");
            assert_eq!(told.body["record"], of_bytes(b"put"));
        }
        delete(&service, "k").await.expect("deleted");
        claim_for(&service, "k", "h", 60_000).await.expect("claimed");
    }

    async fn a_mismatch_is_told_at_once_though_the_claim_would_wait(service) {
        claim_for(&service, "k", "f", 60_000).await.expect("claimed");
        let sent = Instant::now();
        let members = json!({"fingerprint": "g", "wait_ms": 50_000});
        ask(&service, with(wish("k", "b", 60_000), &members)).await.expect("fingerprint_mismatch");
        assert!(sent.elapsed() < PROMPT);
    }

    async fn the_last_put_wins_and_takes_a_new_version(service) {
        let claimed = store(&service, "k", &whole()).await;
        let mut last = claimed;
        for n in 0..4 {
            // Even when nothing seems to change.
            let record = of_bytes(&[b'0' + n / 2]);
            let stored = put(&service, "k", &record).await.expect("stored");
            let version = stored.body["version"].as_i64().unwrap();
            assert!(version > last);
            last = version;
            replays(&service, "k", &record).await;
        }
        assert_eq!(claim(&service, "k", "b", 60_000).await.body["version"], last);
        let state = look(&service, "k").await;
        assert_eq!((state["version"].as_i64(), state.get("owner_id")), (Some(last), None));
        for record in [whole(), of_bytes(b"1")] {
            let late = refused(&service, "k", complete(&service, "k", "a", claimed, &record)).await;
            problem(&late, 409, "already_completed");
            assert_eq!(late.body["current"], json!({"state": "completed", "version": last}));
        }
        let late = refused(&service, "k", release(&service, "k", "a", claimed)).await;
        problem(&late, 409, "already_completed");
    }

    async fn a_put_wins_over_a_lapsed_claim_but_not_over_a_live_one(service) {
        let live = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        let told = json!({"state": "in_progress", "owner_id": "a", "version": live});
        let reply = refused(&service, "k", put(&service, "k", &whole())).await;
        problem(&reply, 409, "already_in_progress");
        assert_eq!(reply.body["current"], told);
        let reply = refused(&service, "k", delete(&service, "k")).await;
        problem(&reply, 409, "already_in_progress");
        assert_eq!(reply.body["current"], told);
        complete(&service, "k", "a", live, &whole()).await.expect("completed");
        put(&service, "k", &of_bytes(b"put")).await.expect("stored");

        let lapsed = claim(&service, "l", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "l").await;
        delete(&service, "l").await.expect("absent");
        let stored = put(&service, "l", &whole()).await.expect("stored");
        assert!(stored.body["version"].as_i64().unwrap() > lapsed);
        for call in ["complete", "renew", "release"] {
            let mut body = reference("l", "a", lapsed);
            if call == "complete" {
                body["record"] = whole();
            }
            let path = format!("/v1/idempotency/{call}");
            let late = refused(&service, "l", service.post(&path, body)).await;
            problem(&late, 409, "already_completed");
        }
        let released = claim(&service, "m", "a", 60_000).await.expect("claimed").version();
        release(&service, "m", "a", released).await.expect("released");
        put(&service, "m", &whole()).await.expect("stored");
        replays(&service, "m", &whole()).await;
    }

    async fn what_is_deleted_can_be_claimed_by_anybody_and_stays_fenced(service) {
        let first = claim_for(&service, "k", "f", 60_000).await.expect("claimed").version();
        complete(&service, "k", "a", first, &whole()).await.expect("completed");
        delete(&service, "k").await.expect("deleted");
        let late = refused(&service, "k", complete(&service, "k", "a", first, &whole())).await;
        problem(&late, 409, "stale_lease");
        let second = claim_for(&service, "k", "g", 60_000).await.expect("claimed");
        assert!(second.version() > first);
        assert_eq!(second.body.get("recovered"), None);
        complete(&service, "k", "a", first, &whole()).await.expect_stale("superseded");
    }

    /// Completed, and asked again and again, a response is kept no longer (`nats-server#7302`);
    /// after it, one of many gets the key (`agentscope-java#3175`).
    async fn retention_counts_from_the_completion_and_then_one_claims(service) {
        let first = claim_for(&service, "k", "f", 60_000).await.expect("claimed").version();
        let members = json!({"record": whole(), "retention_ms": 1_000});
        let body = with(reference("k", "a", first), &members);
        service.post("/v1/idempotency/complete", body.clone()).await.expect("completed");
        let found = get(&service, "k").await.expect("found").body;
        assert_eq!(millis(&found["expires_at"]) - millis(&found["stored_at"]), 1_000);
        let longer = with(body.clone(), &json!({"retention_ms": 60_000}));
        service.post("/v1/idempotency/complete", longer).await.expect("completed");
        let mut replays = 0;
        let before = loop {
            let reply = get(&service, "k").await;
            if reply.outcome() == "absent" {
                break reply;
            }
            let told = claim_for(&service, "k", "f", 60_000).await;
            if told.outcome() == "claimed" {
                release(&service, "k", "a", told.version()).await.expect("released");
                break told;
            }
            for name in ["stored_at", "expires_at", "record"] {
                assert_eq!(told.body[name], found[name], "{name}");
            }
            replays += 1;
        };
        assert!(replays > 0, "{before:#?}");
        let claims: Vec<_> = (0..20).map(|n| {
            let (client, owner) = (service.client.clone(), format!("o{n}"));
            tokio::spawn(async move { claim(&client, "k", &owner, 60_000).await })
        }).collect();
        let mut granted = Vec::new();
        for reply in claims {
            let reply = reply.await.unwrap();
            match reply.outcome() {
                "claimed" => granted.push(reply),
                _ => drop(reply.expect("already_in_progress")),
            }
        }
        assert_eq!(granted.len(), 1);
        assert!(granted[0].version() > first);
        assert_eq!(granted[0].body.get("recovered"), None);
        let acquired_at = millis(&granted[0].body["lease"]["acquired_at"]);
        assert!(acquired_at >= millis(&found["expires_at"]));
        service.post("/v1/idempotency/complete", body).await.expect_stale("superseded");
    }

    async fn what_is_over_is_as_if_it_had_never_been(service) {
        let body = json!({"key": "k", "record": whole(), "retention_ms": 1_000});
        service.put("/v1/idempotency/record", body).await.expect("stored");
        let first = claim_for(&service, "l", "f", 60_000).await.expect("claimed").version();
        let body = with(reference("l", "a", first), &json!({"record": whole(), "retention_ms": 1_000}));
        service.post("/v1/idempotency/complete", body.clone()).await.expect("completed");
        eventually(|| async { list(&service, &[]).await.is_empty() }).await;
        for key in ["k", "l"] {
            get(&service, key).await.expect("absent");
            assert_eq!(look(&service, key).await, json!({"key": key, "state": "absent"}));
            delete(&service, key).await.expect("absent");
            force(&service, key, None).await.expect("not_held");
        }
        service.post("/v1/idempotency/complete", body).await.expect_stale("unknown");
        // Its fingerprint is forgotten with it.
        claim_for(&service, "l", "g", 60_000).await.expect("claimed");
        put(&service, "k", &whole()).await.expect("stored");
    }

    async fn retention_has_bounds(service) {
        let version = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        for wrong in [json!(999), json!(0), json!(-1), json!(31_622_400_001_i64), json!(1_000.0),
                      json!("1000")] {
            let members = json!({"record": whole(), "retention_ms": wrong});
            let body = with(reference("k", "a", version), &members);
            let reply = service.post("/v1/idempotency/complete", body).await;
            assert_eq!(wrong_members(&reply), ["retention_ms"]);
            let body = with(json!({"key": "l"}), &members);
            let reply = service.put("/v1/idempotency/record", body).await;
            assert_eq!(wrong_members(&reply), ["retention_ms"]);
        }
        let longest = 31_622_400_000_i64;
        let body = json!({"key": "l", "record": whole(), "retention_ms": longest});
        let stored = service.put("/v1/idempotency/record", body).await.expect("stored").body;
        assert_eq!(millis(&stored["expires_at"]) - millis(&stored["stored_at"]), longest);
    }

    async fn the_default_retention_is_as_configured(service) {
        let world = World::new(service.world().kind).await;
        let options = CoordinatorOptions {
            idempotency_retention: Retention::from_millis(7_000).unwrap(),
            ..CoordinatorOptions::default()
        };
        let service = world.serve(options).await;
        store(&service, "k", &whole()).await;
        put(&service, "l", &whole()).await.expect("stored");
        for key in ["k", "l"] {
            let found = get(&service, key).await.expect("found").body;
            assert_eq!(millis(&found["expires_at"]) - millis(&found["stored_at"]), 7_000);
        }
        let told = service.get("/v1/capabilities").await.body;
        assert_eq!(told["defaults"]["idempotency_retention_ms"], 7_000);
    }

    async fn the_current_claim_completes_though_its_time_is_over(service) {
        let version = claim(&service, "k", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        complete(&service, "k", "a", version, &whole()).await.expect("completed");
        replays(&service, "k", &whole()).await;
        // Even after its owner was told so.
        let version = claim(&service, "l", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "l").await;
        renew(&service, "l", "a", version).await.expect_stale("expired");
        complete(&service, "l", "a", version, &whole()).await.expect("completed");
    }

    async fn after_a_reclaim_the_older_claim_changes_nothing(service) {
        let first = claim(&service, "k", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        let second = claim(&service, "k", "b", 60_000).await.expect("claimed");
        assert_eq!((&second.body["recovered"], &second.body["previous_version"]),
                   (&json!(true), &json!(first)));
        for state in ["in_progress", "completed"] {
            let late = refused(&service, "k", complete(&service, "k", "a", first, &whole())).await;
            problem(&late, 409, "stale_lease");
            assert_eq!((late.reason(), current(&late)), ("superseded", state));
            for late in [
                refused(&service, "k", release(&service, "k", "a", first)).await,
                refused(&service, "k", renew(&service, "k", "a", first)).await,
            ] {
                assert_eq!((late.reason(), current(&late)), ("superseded", state));
            }
            let done = complete(&service, "k", "b", second.version(), &of_bytes(b"b")).await;
            done.expect("completed");
        }
        replays(&service, "k", &of_bytes(b"b")).await;
    }

    async fn an_equal_completion_succeeds_again_and_another_does_not(service) {
        let version = store(&service, "k", &whole()).await;
        let written = writes(&service).await;
        let before = standing(&service, "k").await;
        for _ in 0..3 {
            complete(&service, "k", "a", version, &whole()).await.expect("completed");
        }
        let other = |name: &str, value: Value| with(whole(), &json!({name: value}));
        for record in [
            other("status", json!(200)), other("content_type", json!("application/json")),
            other("content_type", json!(null)), other("headers", json!([])),
            other("body_base64", json!("")), other("body_base64", json!(null)),
            other("headers", json!([["location", "/orders/7"], ["set-cookie", "b=2"],
                                    ["Set-Cookie", "a=1"]])),
            other("headers", json!([["Location", "/orders/7"], ["Set-Cookie", "a=1"],
                                    ["set-cookie", "b=2"]])),
        ] {
            let reply = complete(&service, "k", "a", version, &record).await;
            problem(&reply, 409, "already_completed");
            let told = json!({"state": "completed", "owner_id": "a", "version": version});
            assert_eq!(reply.body["current"], told);
        }
        assert_eq!(standing(&service, "k").await, before);
        assert_eq!(writes(&service).await, written);
        // Members count, not how they are spelt.
        let spelt = format!(
            r#"{{"record":{{"body_base64":"eyJpZCI6N30=","headers":[["loc\u0061tion","\/orders/7"],
               ["Set-Cookie","a=1"],["set-cookie","b=2"]],
               "content_type":"application/json; charset=utf-8","status":201}},
               "version":{version},"owner_id":"a","scope":"","key":"k"}}"#
        );
        service.post_raw("/v1/idempotency/complete", spelt).await.expect("completed");
        let version = store(&service, "l", &json!({"status": 200})).await;
        let empty = json!({"status": 200, "headers": []});
        complete(&service, "l", "a", version, &empty).await.expect("completed");
    }

    async fn only_the_exact_reference_counts(service) {
        let version = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        for (key, owner, version, reason) in [
            ("k", "b", version, "unknown"), ("k", "A", version, "unknown"),
            ("k", "a", version + 1, "unknown"), ("k", "a", version - 1, "superseded"),
            ("K", "a", version, "unknown"), ("never", "a", 1, "unknown"),
        ] {
            for late in [
                refused(&service, key, complete(&service, key, owner, version, &whole())).await,
                refused(&service, key, renew(&service, key, owner, version)).await,
                refused(&service, key, release(&service, key, owner, version)).await,
            ] {
                problem(&late, 409, "stale_lease");
                assert_eq!(late.reason(), reason);
            }
        }
        let scoped = with(reference("k", "a", version), &json!({"scope": "s"}));
        service.post("/v1/idempotency/renew", scoped).await.expect_stale("unknown");
        renew(&service, "k", "a", version).await.expect("renewed");
    }

    async fn a_released_write_can_be_claimed_at_once(service) {
        let first = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        for _ in 0..3 {
            let released = release(&service, "k", "a", first).await.expect("released");
            assert_eq!(released.body, json!({"outcome": "released"}));
        }
        assert_eq!(look(&service, "k").await["state"], "absent");
        let late = refused(&service, "k", complete(&service, "k", "a", first, &whole())).await;
        problem(&late, 409, "stale_lease");
        assert_eq!(late.reason(), "released");
        renew(&service, "k", "a", first).await.expect_stale("released");
        let second = claim(&service, "k", "b", BRIEF).await.expect("claimed");
        assert!(second.version() > first);
        assert_eq!(second.body.get("recovered"), None);
        release(&service, "k", "a", first).await.expect_stale("superseded");
        until_lapsed(&service, "k").await;
        release(&service, "k", "b", second.version()).await.expect("released");
        let third = claim(&service, "k", "c", 60_000).await.expect("claimed");
        assert_eq!(third.body.get("recovered"), None);
        complete(&service, "k", "c", third.version(), &whole()).await.expect("completed");
        let late = refused(&service, "k", release(&service, "k", "c", third.version())).await;
        problem(&late, 409, "already_completed");
    }

    /// What a refusal says is there is what `state` says is there.
    async fn a_refusal_names_states_as_the_state_call_does(service) {
        let version = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        let other = release(&service, "k", "b", version).await;
        assert_eq!(look(&service, "k").await["state"], current(&other));
        release(&service, "k", "a", version).await.expect("released");
        let late = complete(&service, "k", "a", version, &whole()).await;
        assert_eq!(look(&service, "k").await["state"], current(&late));
        let version = store(&service, "k", &whole()).await;
        let other = complete(&service, "k", "b", version, &whole()).await;
        assert_eq!(look(&service, "k").await["state"], current(&other));
    }

    async fn a_renewal_extends_the_claim_and_keeps_its_version(service) {
        let first = claim(&service, "k", "a", 1_000).await.expect("claimed");
        let version = first.version();
        let body = with(reference("k", "a", version), &json!({"ttl_ms": 60_000}));
        let renewed = service.post("/v1/idempotency/renew", body).await.expect("renewed");
        no_nulls(&renewed.body);
        let lease = &renewed.body["lease"];
        assert_eq!((lease["version"].as_i64(), &lease["ttl_ms"]), (Some(version), &json!(60_000)));
        assert_eq!(lease["acquired_at"], first.body["lease"]["acquired_at"]);
        assert_eq!(lease["renew_after_ms"], 20_000);
        assert!(lease["expires_in_ms"].as_i64().unwrap() > 30_000);
        // Never earlier than it was.
        let body = with(reference("k", "a", version), &json!({"ttl_ms": 100}));
        let shorter = service.post("/v1/idempotency/renew", body).await.expect("renewed");
        assert_eq!(shorter.body["lease"]["expires_at"], lease["expires_at"]);
        let told = claim(&service, "k", "b", 60_000).await.expect("already_in_progress");
        assert_eq!(told.body["holder"]["expires_at"], lease["expires_at"]);
        complete(&service, "k", "a", version, &whole()).await.expect("completed");
        let late = refused(&service, "k", renew(&service, "k", "a", version)).await;
        problem(&late, 409, "already_completed");
    }

    async fn a_lapsed_claim_cannot_be_renewed(service) {
        let first = claim(&service, "k", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "k").await;
        for _ in 0..2 {
            let late = renew(&service, "k", "a", first).await;
            problem(&late, 409, "stale_lease");
            assert_eq!((late.reason(), current(&late)), ("expired", "in_progress"));
        }
        let next = claim(&service, "k", "b", 60_000).await.expect("claimed");
        assert_eq!(next.body["previous_version"], first);
    }

    async fn a_repeated_attempt_gets_the_same_claim_and_a_late_one_nothing(service) {
        let attempt = |key, ttl_ms| with(wish(key, "a", ttl_ms), &json!({"attempt_id": ATTEMPT}));
        let first = ask(&service, attempt("k", 60_000)).await.expect("claimed");
        let members = json!({"wait_ms": 20_000});
        let again = ask(&service, with(attempt("k", 1_000), &members)).await.expect("claimed");
        assert_eq!((&first.body["repeated"], &again.body["repeated"]), (&json!(false), &json!(true)));
        for name in ["version", "ttl_ms", "acquired_at", "expires_at"] {
            assert_eq!(again.body["lease"][name], first.body["lease"][name], "{name}");
        }
        release(&service, "k", "a", first.version()).await.expect("released");
        let late = refused(&service, "k", ask(&service, attempt("k", 60_000))).await;
        assert_eq!(late.reason(), "released");
        ask(&service, attempt("l", BRIEF)).await.expect("claimed");
        until_lapsed(&service, "l").await;
        ask(&service, attempt("l", BRIEF)).await.expect_stale("expired");
    }

    async fn of_twenty_that_wait_one_writes_and_the_others_get_its_response(service) {
        let began = Instant::now();
        let mut claims = JoinSet::new();
        for n in 0..20 {
            let wait = attach(&service, "k", &format!("o{n}"), 50_000);
            claims.spawn(async move { wait.await.unwrap() });
        }
        let granted = claims.join_next().await.unwrap().unwrap().expect("claimed");
        service.until_waiters(19).await;
        let owner = granted.body["lease"]["owner_id"].as_str().unwrap();
        let all: Vec<u8> = (0..=255).collect();
        let record = with(whole(), &of_bytes(&all));
        complete(&service, "k", owner, granted.version(), &record).await.expect("completed");
        for told in claims.join_all().await {
            let told = told.expect("completed");
            assert_eq!(told.body["record"], record);
            assert_eq!(told.body["version"], granted.version());
        }
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    }

    async fn on_release_or_lapse_one_who_waits_claims(service) {
        let first = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        let waits = [attach(&service, "k", "b", 50_000), attach(&service, "k", "b", 50_000)];
        service.until_waiters(2).await;
        release(&service, "k", "a", first).await.expect("released");
        let mut line = JoinSet::new();
        for wait in waits {
            line.spawn(async move { wait.await.unwrap() });
        }
        let second = line.join_next().await.unwrap().unwrap().expect("claimed");
        assert_eq!(second.body.get("recovered"), None);
        service.until_waiters(1).await;
        force(&service, "k", Some(second.version())).await.expect("released");
        let third = line.join_next().await.unwrap().unwrap().expect("claimed");
        assert_eq!(third.body["previous_version"], second.version());
        let fourth = claim(&service, "l", "a", 700).await.expect("claimed");
        let fifth = attach(&service, "l", "b", 50_000).await.unwrap().expect("claimed");
        assert_eq!(fifth.body["previous_version"], fourth.version());
        let told = attach(&service, "l", "c", 500).await.unwrap().expect("already_in_progress");
        assert_eq!(told.body["holder"]["version"], fifth.version());
    }

    async fn a_state_tells_where_a_write_is(service) {
        assert_eq!(look(&service, "k").await, json!({"key": "k", "state": "absent"}));
        let first = claim_for(&service, "k", "f", BRIEF).await.expect("claimed");
        let running = look(&service, "k").await;
        assert_eq!(names(&running), ["acquired_at", "expires_at", "expires_in_ms", "fingerprint",
                                     "key", "owner_id", "reclaimable", "state", "version"]);
        assert_eq!(running["state"], "in_progress");
        for name in ["acquired_at", "expires_at", "owner_id", "version"] {
            assert_eq!(running[name], first.body["lease"][name], "{name}");
        }
        until_lapsed(&service, "k").await;
        assert_eq!(look(&service, "k").await["state"], "in_progress");
        complete(&service, "k", "a", first.version(), &whole()).await.expect("completed");
        let done = look(&service, "k").await;
        no_nulls(&done);
        assert_eq!(names(&done), ["expires_at", "expires_in_ms", "fingerprint", "key", "owner_id",
                                  "state", "stored_at", "version"]);
        let found = get(&service, "k").await.body;
        assert_eq!((&done["state"], &done["expires_at"]), (&json!("completed"), &found["expires_at"]));
        let query = [("key", "k"), ("scope", "s")];
        let other = service.get_with("/v1/idempotency/state", &query).await.body;
        assert_eq!(other, json!({"key": "k", "scope": "s", "state": "absent"}));
    }

    async fn a_list_shows_one_scope_without_what_is_stored(service) {
        for key in ["a1", "a2", "b1"] {
            store(&service, key, &whole()).await;
        }
        claim(&service, "a3 runs", "a", 60_000).await.expect("claimed");
        let freed = claim(&service, "a4 freed", "a", 60_000).await.expect("claimed").version();
        release(&service, "a4 freed", "a", freed).await.expect("released");
        claim(&service, "c lapsed", "a", BRIEF).await.expect("claimed");
        until_lapsed(&service, "c lapsed").await;
        for (scope, key) in [("s", "a1"), ("s", "z"), ("s2", "a1")] {
            let body = json!({"key": key, "scope": scope, "record": whole()});
            service.put("/v1/idempotency/record", body).await.expect("stored");
        }
        let all = ["a1", "a2", "a3 runs", "b1", "c lapsed"];
        for limit in ["1", "2", "1000"] {
            assert_eq!(list(&service, &[("limit", limit)]).await, all);
        }
        assert_eq!(list(&service, &[("scope", "")]).await, all);
        assert_eq!(list(&service, &[("scope", "s")]).await, ["a1", "z"]);
        assert_eq!(list(&service, &[("scope", "none")]).await, [""; 0]);
        assert_eq!(list(&service, &[("prefix", "a")]).await, ["a1", "a2", "a3 runs"]);
        assert_eq!(list(&service, &[("state", "completed")]).await, ["a1", "a2", "b1"]);
        assert_eq!(list(&service, &[("state", "in_progress")]).await, ["a3 runs", "c lapsed"]);
        let page = service.get("/v1/idempotency").await.body;
        for item in page["items"].as_array().unwrap() {
            let key = item["key"].as_str().unwrap();
            assert_eq!(at_rest(item.clone()), at_rest(look(&service, key).await));
            assert_eq!(item.get("record"), None);
        }
        for state in ["absent", "held", ""] {
            let reply = service.get_with("/v1/idempotency", &[("state", state)]).await;
            assert_eq!(wrong_members(&reply), ["state"], "{state}");
        }
    }

    async fn a_forced_release_frees_a_claim_and_nothing_else(service) {
        force(&service, "never", None).await.expect("not_held");
        let first = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        force(&service, "k", Some(first + 1)).await.expect("not_held");
        let freed = force(&service, "k", Some(first)).await.expect("released");
        assert_eq!(freed.body, json!({"outcome": "released", "version": first}));
        for late in [
            refused(&service, "k", complete(&service, "k", "a", first, &whole())).await,
            refused(&service, "k", renew(&service, "k", "a", first)).await,
            refused(&service, "k", release(&service, "k", "a", first)).await,
        ] {
            assert_eq!(late.reason(), "revoked");
        }
        let second = claim(&service, "k", "b", 60_000).await.expect("claimed");
        assert_eq!(second.body["previous_version"], first);
        complete(&service, "k", "b", second.version(), &whole()).await.expect("completed");
        force(&service, "k", None).await.expect("not_held");
        replays(&service, "k", &whole()).await;
        put(&service, "l", &whole()).await.expect("stored");
        force(&service, "l", None).await.expect("not_held");
        let body = json!({"key": "m", "scope": "s", "owner_id": "a"});
        ask(&service, body).await.expect("claimed");
        force(&service, "m", None).await.expect("not_held");
        let body = json!({"key": "m", "scope": "s", "reason": "a test"});
        service.post("/v1/idempotency/force-release", body).await.expect("released");
        let reply = service.post("/v1/idempotency/force-release", json!({"key": "k"})).await;
        assert_eq!(wrong_members(&reply), ["reason"]);
    }

    async fn requests_are_read_strictly(service) {
        let whole_wish = with(wish("k", "a", 60_000), &json!({"scope": "s"}));
        for (name, value) in [
            ("key", json!("")), ("key", json!("é".repeat(257))), ("key", json!("a\tb")),
            ("scope", json!("s".repeat(513))), ("scope", json!("\u{7f}")), ("scope", json!(1)),
            ("owner_id", json!("")), ("ttl_ms", json!(99)), ("ttl_ms", json!(86_400_001)),
            ("attempt_id", json!("x")), ("wait_ms", json!(50_001)), ("intent", json!("i")),
            ("metadata", json!({})), ("correlation_id", json!("c")), ("record", whole()),
            ("retention_ms", json!(1_000)),
        ] {
            let reply = ask(&service, with(whole_wish.clone(), &json!({name: value}))).await;
            assert_eq!(wrong_members(&reply), [name]);
        }
        let reply = ask(&service, json!({})).await;
        assert_eq!(wrong_members(&reply), ["key", "owner_id"]);
        let scoped = with(whole_wish, &json!({"scope": "s".repeat(512), "key": "k".repeat(512)}));
        ask(&service, scoped).await.expect("claimed");
        for path in ["/v1/idempotency/record", "/v1/idempotency/state"] {
            for query in [&[][..], &[("key", "")], &[("key", "a\nb")]] {
                assert_eq!(wrong_members(&service.get_with(path, query).await), ["key"]);
            }
            let reply = service.get_with(path, &[("key", "k"), ("x", "1")]).await;
            assert_eq!(wrong_members(&reply), ["x"]);
        }
        let reply = service.delete_with("/v1/idempotency/record", &[("scope", "s")]).await;
        assert_eq!(wrong_members(&reply), ["key"]);
        let reply = service.post("/v1/idempotency/record", json!({})).await;
        problem(&reply, 405, "method_not_allowed");
        let body = json!({"key": "k", "record": whole(), "owner_id": "a"});
        let reply = service.put("/v1/idempotency/record", body).await;
        assert_eq!(wrong_members(&reply), ["owner_id"]);
        let plain = service.http.put(format!("{}/v1/idempotency/record", service.base));
        let reply = plain.body(r#"{"key":"k","record":{"status":200}}"#).send().await.unwrap();
        assert_eq!(reply.status().as_u16(), 415);
    }

    async fn clean_up_deletes_what_is_over_and_versions_still_rise(service) {
        let world = World::new(service.world().kind).await;
        let options = CoordinatorOptions {
            idle_key_retention: Duration::ZERO,
            cleanup_interval: Duration::from_millis(20),
            ..CoordinatorOptions::default()
        };
        let service = world.serve(options).await;
        let runs = claim(&service, "runs", "a", 60_000).await.expect("claimed").version();
        put(&service, "kept", &whole()).await.expect("stored");
        let mut last = 0;
        for round in 1..=2 {
            let stored = store(&service, "deleted", &whole()).await;
            assert!(stored > last);
            delete(&service, "deleted").await.expect("deleted");
            let version = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
            assert!(version > last);
            last = version;
            let members = json!({"record": whole(), "retention_ms": 1_000});
            let body = with(reference("k", "a", version), &members);
            service.post("/v1/idempotency/complete", body).await.expect("completed");
            let cleaned = f64::from(2 * round);
            let name = "fencepost_cleaned_keys_total";
            eventually(|| async { service.metric(name).await == cleaned }).await;
        }
        replays(&service, "kept", &whole()).await;
        complete(&service, "runs", "a", runs, &whole()).await.expect("completed");
    }

    async fn responses_outlive_a_restart_and_a_crash_costs_at_most_the_lease(service) {
        let kind = service.world().kind;
        if kind == Kind::Memory {
            return;
        }
        let world = World::new(kind).await;
        let crashing = Process::start(&world.url(), &[]);
        let all: Vec<u8> = (0..=255).collect();
        let record = with(whole(), &of_bytes(&all));
        let done = store(&crashing, "done", &record).await;
        let first = claim(&crashing, "k", "a", 2_000).await.expect("claimed");
        crashing.kill();
        let service = world.serve(CoordinatorOptions::default()).await;
        replays(&service, "done", &record).await;
        complete(&service, "done", "a", done, &record).await.expect("completed");
        let next = attach(&service, "k", "b", 50_000).await.unwrap().expect("claimed");
        assert_eq!(next.body["previous_version"], first.version());
        let ended = millis(&first.body["lease"]["expires_at"]);
        let began = millis(&next.body["lease"]["acquired_at"]);
        assert!((0..20_000).contains(&(began - ended)), "{}", began - ended);
    }
}

/// Puts many keys, many at a time.
async fn put_all(client: &Client, keys: impl Iterator<Item = String>) {
    let keys: Vec<String> = keys.collect();
    for chunk in keys.chunks(64) {
        let mut puts = JoinSet::new();
        for key in chunk {
            let (client, key) = (client.clone(), key.clone());
            puts.spawn(async move { put(&client, &key, &json!({"status": 200})).await });
        }
        for reply in puts.join_all().await {
            reply.expect("stored");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_store_drops_the_oldest_response_beyond_its_limit() {
    let service = Service::start(Kind::Memory).await;
    let most = limit(&service, "stored_responses").await;
    assert_eq!(most, 4_096);
    let runs = claim(&service, "runs", "a", 60_000).await.expect("claimed").version();
    let mut versions = Vec::new();
    for n in 0..5 {
        let stored = put(&service, &format!("k{n}"), &of_bytes(b"old")).await.expect("stored");
        versions.push(stored.body["version"].as_i64().unwrap());
    }
    put_all(&service, (5..most).map(|n| format!("k{n}"))).await;
    let found = async |key: &str| get(&service, key).await.outcome() == "found";
    assert!(found("k0").await && found("k1").await && found("k2").await);
    // Overwriting keeps the place.
    put(&service, "k0", &of_bytes(b"new")).await.expect("stored");
    assert!(found("k0").await && found("k1").await);
    put(&service, "more 1", &whole()).await.expect("stored");
    assert!(!found("k0").await && found("k1").await && found("more 1").await);
    // What is in progress is not dropped, and takes a place only when it is stored.
    claim(&service, "more 2", "a", 60_000).await.expect("claimed");
    assert!(found("k1").await);
    complete(&service, "runs", "a", runs, &whole()).await.expect("completed");
    assert!(!found("k1").await && found("k2").await && found("runs").await);
    // What is deleted makes room.
    delete(&service, "k5").await.expect("deleted");
    put(&service, "more 3", &whole()).await.expect("stored");
    assert!(found("k2").await);
    put_all(&service, (0..100).map(|n| format!("again {n}"))).await;
    assert!(!found("k2").await && !found("k3").await && !found("k4").await);
    claim(&service, "more 2", "b", 60_000).await.expect("already_in_progress");
    // What was dropped can be claimed, above all that was.
    for (n, version) in versions.into_iter().enumerate() {
        let granted = claim(&service, &format!("k{n}"), "a", 60_000).await.expect("claimed");
        assert!(granted.version() > version);
    }
    assert_eq!(list(&service, &[("state", "completed"), ("limit", "1000")]).await.len(), most);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_stores_have_no_such_limit() {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let told = Service::start(kind).await.get("/v1/capabilities").await.body;
        assert_eq!(told["limits"].get("stored_responses"), None);
    }
}
