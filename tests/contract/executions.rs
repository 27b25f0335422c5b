//! Executions: one invocation runs once, is recovered safely, and its result is replayed exactly.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fencepost::coordinator::CoordinatorOptions;
use fencepost::domain::time::Retention;
use serde_json::{Value, json};
use tokio::task::{JoinHandle, JoinSet};

use crate::check::{
    BRIEF, at_rest, limit, millis, names, no_nulls, problem, random_text, text_of, writes,
    wrong_members,
};
use crate::on_every_store;
use crate::reads::ODD_KEYS;
use crate::support::process::Process;
use crate::support::{Client, Kind, Reply, Service, World, eventually};
use crate::wire::{exchange, post_chunked};

/// Longer than what is told at once takes on a busy machine, and far shorter than any wait here.
const PROMPT: Duration = Duration::from_secs(20);

const ATTEMPT: &str = "0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00";

/// Results that a store or a serializer might bend.
const RESULTS: &[&str] = &[
    "null",
    "\"\"",
    "{}",
    "[]",
    "0",
    "-0",
    "-0.0",
    "1.0",
    "1e2",
    "1E+02",
    "1E400",
    "-1e-400",
    "12345678901234567890",
    "0.1234567890123456789012345678901234567890",
    "true",
    "false",
    r#"{"z":1,"a":1.0,"a":2,"n":1E400,"b":12345678901234567890,"s":"\u00e9\/"}"#,
    "{ \"z\" : 1 ,\t\"a\":[ 1 , 2 ] ,\r\n\"b\" : { } }",
    r#"{"":{"":""},"null":null,"x":[null,null]}"#,
    r#""\u0000 \ud83d\ude00 \\ \" \b\f\n\r\t""#,
    "\"\u{e9} e\u{301} \u{feff} \u{2028} \u{1f600} \u{10ffff}\"",
    "\"'; DROP TABLE records; --\"",
    r#""$1 ?1 %s {0}""#,
    r#"{"outcome":"claimed","lease":null}"#,
    "[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]",
];

fn wish(id: &str, intent: &str, owner: &str, ttl_ms: i64) -> Value {
    json!({"execution_id": id, "intent": intent, "owner_id": owner, "ttl_ms": ttl_ms})
}

fn attempt(id: &str, owner: &str, ttl_ms: i64) -> Value {
    let mut wish = wish(id, "i", owner, ttl_ms);
    wish["attempt_id"] = json!(ATTEMPT);
    wish
}

async fn ask(client: &Client, body: Value) -> Reply {
    client.post("/v1/executions/claim", body).await
}

/// A claim for the intent `i`.
async fn claim(client: &Client, id: &str, owner: &str, ttl_ms: i64) -> Reply {
    ask(client, wish(id, "i", owner, ttl_ms)).await
}

/// A claim for the intent `i` that waits, on its way.
fn attach(client: &Client, id: &str, owner: &str, wait_ms: i64) -> JoinHandle<Reply> {
    let mut body = wish(id, "i", owner, 60_000);
    body["wait_ms"] = json!(wait_ms);
    let client = client.clone();
    tokio::spawn(async move { ask(&client, body).await })
}

fn reference(id: &str, owner: &str, version: i64) -> Value {
    json!({"execution_id": id, "owner_id": owner, "version": version})
}

/// A completion with a result as it stands.
async fn complete(client: &Client, id: &str, owner: &str, version: i64, result: &str) -> Reply {
    let mut body = reference(id, owner, version).to_string();
    body.truncate(body.len() - 1);
    client.post_raw("/v1/executions/complete", format!("{body},\"result\":{result}}}")).await
}

async fn release(client: &Client, id: &str, owner: &str, version: i64) -> Reply {
    client.post("/v1/executions/release", reference(id, owner, version)).await
}

async fn force(client: &Client, id: &str, version: Option<i64>) -> Reply {
    let body = json!({"execution_id": id, "reason": "a test", "version": version});
    client.post("/v1/executions/force-release", body).await
}

async fn look(client: &Client, id: &str) -> Reply {
    client.get_with("/v1/executions/state", &[("execution_id", id)]).await
}

/// What is known of an execution, without what time alone changes.
async fn standing(client: &Client, id: &str) -> Value {
    at_rest(look(client, id).await.body)
}

/// Waits until the time of a claim is over by the store's clock, which nobody is told thereby.
async fn until_lapsed(client: &Client, id: &str) {
    // A list goes by the store's own time; a state is told a little later than that.
    eventually(|| async {
        let page = client.get_with("/v1/executions", &[("prefix", id)]).await.body;
        let mut items = page["items"].as_array().unwrap().iter();
        items.any(|item| item["execution_id"] == id && item["reclaimable"] == true)
    })
    .await;
}

/// Fails unless a call is refused and leaves no trace.
async fn refused<F: Future<Output = Reply>>(client: &Client, id: &str, call: F) -> Reply {
    let (before, written) = (standing(client, id).await, writes(client).await);
    let reply = call.await;
    assert_eq!(reply.status, 409, "{reply:#?}");
    assert_eq!(standing(client, id).await, before);
    assert_eq!(writes(client).await, written, "a refusal wrote something");
    reply
}

/// The state of what is there instead, as a 409 tells it.
fn current(reply: &Reply) -> &str {
    reply.body["current"]["state"].as_str().unwrap_or_default()
}

on_every_store! {
    async fn a_new_execution_is_claimed_and_told_in_full(service) {
        let granted = claim(&service, "x", "a", 20_000).await.expect("claimed");
        assert!(granted.text.starts_with(r#"{"outcome":"claimed","#), "{}", granted.text);
        no_nulls(&granted.body);
        assert_eq!(names(&granted.body), ["elapsed_ms", "lease", "outcome", "repeated"]);
        assert_eq!(granted.body["repeated"], false);
        let lease = &granted.body["lease"];
        // There is no renewal, so nothing is said of it.
        assert_eq!(names(lease), ["acquired_at", "execution_id", "expires_at", "expires_in_ms",
                                  "owner_id", "ttl_ms", "version"]);
        assert_eq!((&lease["execution_id"], &lease["owner_id"]), (&json!("x"), &json!("a")));
        assert_eq!(millis(&lease["expires_at"]) - millis(&lease["acquired_at"]), 20_000);
        assert!((1..=20_000).contains(&lease["expires_in_ms"].as_i64().unwrap()));
    }

    async fn one_that_runs_is_already_in_progress(service) {
        let granted = claim(&service, "x", "a", 20_000).await.expect("claimed");
        for owner in ["b", "a"] {
            let told = claim(&service, "x", owner, 60_000).await.expect("already_in_progress");
            no_nulls(&told.body);
            assert_eq!(names(&told.body), ["elapsed_ms", "holder", "outcome", "retry_after_ms"]);
            let holder = &told.body["holder"];
            assert_eq!(names(holder), ["acquired_at", "expires_at", "expires_in_ms", "owner_id",
                                       "version"]);
            for name in ["owner_id", "version", "acquired_at", "expires_at"] {
                assert_eq!(holder[name], granted.body["lease"][name], "{name}");
            }
            assert!((0..=1_000).contains(&told.body["retry_after_ms"].as_i64().unwrap()));
        }
    }

    async fn a_claim_that_names_no_ttl_lasts_half_a_minute(service) {
        let body = json!({"execution_id": "x", "intent": "i", "owner_id": "a"});
        let granted = ask(&service, body).await.expect("claimed");
        assert_eq!(granted.body["lease"]["ttl_ms"], 30_000);
    }

    async fn a_completed_one_is_told_with_its_result(service) {
        let mut body = wish("x", "i", "a", 60_000);
        body["correlation_id"] = json!("trace 1");
        let granted = ask(&service, body).await.expect("claimed");
        let done = complete(&service, "x", "a", granted.version(), r#"{"n":1}"#).await;
        assert_eq!(done.expect("completed").body, json!({"outcome": "completed"}));
        let told = claim(&service, "x", "b", 60_000).await.expect("completed");
        assert_eq!(names(&told.body), ["completed_at", "correlation_id", "elapsed_ms", "outcome",
                                       "result", "version"]);
        assert_eq!(told.body["result"], json!({"n": 1}));
        assert_eq!(told.body["version"], granted.version());
        assert_eq!(told.body["correlation_id"], "trace 1");
        let acquired_at = millis(&granted.body["lease"]["acquired_at"]);
        assert!(millis(&told.body["completed_at"]) >= acquired_at);
        // For ever, whoever asks.
        for owner in ["a", "b", "c"] {
            let again = claim(&service, "x", owner, 60_000).await.expect("completed");
            assert_eq!(again.body["completed_at"], told.body["completed_at"]);
        }
    }

    async fn of_many_first_claims_at_once_one_is_granted(service) {
        for round in 0..5 {
            let id = format!("x{round}");
            let mut claims = JoinSet::new();
            for n in 0..20 {
                let (client, id) = (service.client.clone(), id.clone());
                claims.spawn(async move { claim(&client, &id, &format!("o{n}"), 60_000).await });
            }
            let mut granted = 0;
            for reply in claims.join_all().await {
                match reply.outcome() {
                    "claimed" => granted += 1,
                    _ => drop(reply.expect("already_in_progress")),
                }
            }
            assert_eq!(granted, 1);
        }
    }

    async fn another_intent_conflicts_in_every_state(service) {
        let conflicts = |what: &'static str| {
            let client = service.client.clone();
            async move {
                let (before, written) = (look(&client, "x").await.body, writes(&client).await);
                for intent in ["j", "I", "i ", " i", "\u{ec}"] {
                    let told = ask(&client, wish("x", intent, "a", 60_000)).await;
                    let told = told.expect("intent_conflict");
                    assert_eq!(names(&told.body), ["elapsed_ms", "outcome"], "{what}");
                }
                assert_eq!(at_rest(look(&client, "x").await.body), at_rest(before), "{what}");
                assert_eq!(writes(&client).await, written, "{what}");
            }
        };
        let first = claim(&service, "x", "a", BRIEF).await.expect("claimed").version();
        conflicts("in progress").await;
        until_lapsed(&service, "x").await;
        conflicts("lapsed").await;
        release(&service, "x", "a", first).await.expect("released");
        conflicts("released").await;
        claim(&service, "x", "a", 60_000).await.expect("claimed");
        force(&service, "x", None).await.expect("released");
        conflicts("freed by force").await;
        let last = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        complete(&service, "x", "a", last, "1").await.expect("completed");
        conflicts("completed").await;
        claim(&service, "x", "a", 60_000).await.expect("completed");
    }

    async fn a_conflict_is_told_at_once_though_the_claim_would_wait(service) {
        claim(&service, "x", "a", 60_000).await.expect("claimed");
        let mut body = wish("x", "j", "b", 60_000);
        body["wait_ms"] = json!(50_000);
        let sent = Instant::now();
        ask(&service, body).await.expect("intent_conflict");
        assert!(sent.elapsed() < PROMPT);
    }

    /// The intent decides before the attempt does.
    async fn an_attempt_with_another_intent_conflicts(service) {
        ask(&service, attempt("x", "a", 60_000)).await.expect("claimed");
        let mut other = attempt("x", "a", 60_000);
        other["intent"] = json!("j");
        ask(&service, other).await.expect("intent_conflict");
    }

    async fn a_correlation_id_decides_nothing(service) {
        let with = |owner, correlation| {
            let mut body = wish("x", "i", owner, BRIEF);
            body["correlation_id"] = json!(correlation);
            body
        };
        ask(&service, with("a", "one")).await.expect("claimed");
        ask(&service, with("b", "two")).await.expect("already_in_progress");
        assert_eq!(standing(&service, "x").await["correlation_id"], "one");
        until_lapsed(&service, "x").await;
        let second = ask(&service, with("b", "two")).await.expect("claimed").version();
        assert_eq!(standing(&service, "x").await["correlation_id"], "two");
        complete(&service, "x", "b", second, "1").await.expect("completed");
        let told = ask(&service, with("c", "three")).await.expect("completed");
        assert_eq!(told.body["correlation_id"], "two");
    }

    /// A store that keeps JSON as a tree loses all of this (`hasura/graphql-engine#5854`,
    /// `cockroachdb/docs#6654`); and of an empty result, some lose all (`hono-idempotency#92`).
    async fn a_result_is_replayed_exactly_as_it_was_sent(service) {
        for (n, result) in RESULTS.iter().enumerate() {
            let id = format!("x{n}");
            let version = claim(&service, &id, "a", 60_000).await.expect("claimed").version();
            // What stands around it is not part of it.
            let sent = format!(" \n{result}\t ");
            complete(&service, &id, "a", version, &sent).await.expect("completed");
            let told = claim(&service, &id, "b", 60_000).await;
            assert_eq!(told.status, 200);
            assert!(told.text.starts_with(r#"{"outcome":"completed","#), "{}", told.text);
            assert_eq!(text_of(&told, "result"), *result);
            assert_eq!(text_of(&look(&service, &id).await, "result"), *result);
            complete(&service, &id, "a", version, result).await.expect("completed");
        }
    }

    async fn a_result_must_be_there_and_be_json(service) {
        let version = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        let reply = service.post("/v1/executions/complete", reference("x", "a", version)).await;
        assert_eq!(wrong_members(&reply), ["result"]);
        for wrong in ["", "{", "01", "1.", ".5", "+1", "NaN", "'a'", "\"\n\"", "[1,]", "nul", "1 2"] {
            let reply = complete(&service, "x", "a", version, wrong).await;
            problem(&reply, 400, "invalid_json");
        }
        complete(&service, "x", "a", version, r#"1,"result":2"#).await.expect("invalid_request");
        claim(&service, "x", "b", 60_000).await.expect("already_in_progress");
    }

    async fn the_largest_result_is_kept_and_a_larger_one_changes_nothing(service) {
        let most = limit(&service, "result_bytes").await;
        assert_eq!(most, 1 << 20);
        let version = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        let before = standing(&service, "x").await;
        let of = |bytes: usize| format!("\"{}\"", random_text(bytes - 2, "abcé😀"));
        for over in [most + 1, most + 60_000] {
            let reply = complete(&service, "x", "a", version, &of(over)).await;
            problem(&reply, 413, "payload_too_large");
            assert_eq!(reply.body["limit"], "result_bytes");
        }
        // So large that it is not read to its end.
        let mut body = reference("x", "a", version).to_string();
        body.truncate(body.len() - 1);
        let body = format!("{body},\"result\":{}}}", of(4 * most));
        let request = post_chunked("/v1/executions/complete", body.as_bytes(), 60_000);
        let reply = exchange(&service.base, request).await;
        assert!(matches!(reply.status, 413 | 0), "{}", reply.head);
        assert_eq!(standing(&service, "x").await, before);
        let result = of(most);
        assert_eq!(result.len(), most);
        complete(&service, "x", "a", version, &result).await.expect("completed");
        let told = claim(&service, "x", "b", 60_000).await.expect("completed");
        assert!(text_of(&told, "result") == result, "the largest result came back changed");
    }

    async fn the_current_claim_completes_though_its_time_is_over(service) {
        let version = claim(&service, "x", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "x").await;
        complete(&service, "x", "a", version, "1").await.expect("completed");
        let told = claim(&service, "x", "b", 60_000).await.expect("completed");
        assert_eq!((&told.body["result"], &told.body["version"]), (&json!(1), &json!(version)));
        // Even after somebody was told that the time is over.
        ask(&service, attempt("y", "a", BRIEF)).await.expect("claimed");
        until_lapsed(&service, "y").await;
        let late = ask(&service, attempt("y", "a", BRIEF)).await;
        late.clone().expect_stale("expired");
        let version = late.body["current"]["version"].as_i64().unwrap();
        assert_eq!(current(&late), "in_progress");
        assert_eq!(standing(&service, "y").await["reclaimable"], true);
        complete(&service, "y", "a", version, "2").await.expect("completed");
    }

    async fn after_a_reclaim_the_older_claim_cannot_complete(service) {
        let first = claim(&service, "x", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "x").await;
        let second = claim(&service, "x", "b", 60_000).await.expect("claimed").version();
        let late = refused(&service, "x", complete(&service, "x", "a", first, "1")).await;
        problem(&late, 409, "stale_lease");
        let told = json!({"state": "in_progress", "owner_id": "b", "version": second});
        assert_eq!((late.reason(), &late.body["current"]), ("superseded", &told));
        complete(&service, "x", "b", second, "2").await.expect("completed");
        // Not even with the same result.
        for result in ["1", "2"] {
            let late = refused(&service, "x", complete(&service, "x", "a", first, result)).await;
            assert_eq!((late.reason(), current(&late)), ("superseded", "completed"));
        }
        let told = claim(&service, "x", "c", 60_000).await.expect("completed");
        assert_eq!(told.body["result"], 2);
    }

    /// The same owner, too, is told that its older run lost.
    async fn an_owner_cannot_complete_with_its_older_claim(service) {
        let first = claim(&service, "x", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "x").await;
        let second = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        assert!(second > first);
        complete(&service, "x", "a", first, "1").await.expect_stale("superseded");
        release(&service, "x", "a", first).await.expect_stale("superseded");
        complete(&service, "x", "a", second, "2").await.expect("completed");
    }

    async fn the_same_completion_succeeds_again_and_another_does_not(service) {
        let version = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        let result = r#"{"a": 1.0}"#;
        complete(&service, "x", "a", version, result).await.expect("completed");
        let (before, written) = (look(&service, "x").await.text, writes(&service).await);
        for _ in 0..3 {
            complete(&service, "x", "a", version, result).await.expect("completed");
        }
        // Equal is what has the same bytes.
        for other in [r#"{"a":1.0}"#, r#"{"a": 1}"#, r#"{"\u0061": 1.0}"#, "null", "{}"] {
            let refused = complete(&service, "x", "a", version, other).await;
            problem(&refused, 409, "already_completed");
            let told = json!({"state": "completed", "owner_id": "a", "version": version});
            assert_eq!(refused.body["current"], told);
        }
        assert_eq!(look(&service, "x").await.text, before);
        assert_eq!(writes(&service).await, written);
    }

    async fn only_the_exact_reference_completes(service) {
        let version = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        for (id, owner, version, reason) in [
            ("x", "b", version, "unknown"),
            ("x", "A", version, "unknown"),
            ("x", "a", version + 1, "unknown"),
            ("x", "a", version - 1, "superseded"),
            ("X", "a", version, "unknown"),
            ("never", "a", 1, "unknown"),
        ] {
            let call = complete(&service, id, owner, version, "1");
            assert_eq!(refused(&service, id, call).await.reason(), reason);
            let call = release(&service, id, owner, version);
            assert_eq!(refused(&service, id, call).await.reason(), reason);
        }
        let nothing = complete(&service, "never", "a", 1, "1").await;
        assert_eq!(nothing.body.get("current"), None);
        complete(&service, "x", "a", version, "1").await.expect("completed");
        // A completed one belongs to its owner, whatever the result.
        let call = complete(&service, "x", "b", version, "1");
        let other = refused(&service, "x", call).await;
        assert_eq!((other.reason(), current(&other)), ("unknown", "completed"));
        assert_eq!(look(&service, "never").await.body,
                   json!({"execution_id": "never", "state": "absent"}));
    }

    async fn a_released_one_can_be_claimed_at_once_and_stays_bound(service) {
        let first = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        let released = release(&service, "x", "a", first).await.expect("released");
        assert_eq!(released.body, json!({"outcome": "released"}));
        let state = standing(&service, "x").await;
        assert_eq!((&state["state"], &state["intent"]), (&json!("released"), &json!("i")));
        ask(&service, wish("x", "j", "b", 60_000)).await.expect("intent_conflict");
        let second = claim(&service, "x", "b", 60_000).await.expect("claimed");
        assert!(second.version() > first);
        assert_eq!(second.body.get("recovered"), None);
        assert_eq!(second.body.get("previous_version"), None);
    }

    async fn a_release_succeeds_again_until_the_next_claim(service) {
        let first = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        for _ in 0..3 {
            release(&service, "x", "a", first).await.expect("released");
        }
        claim(&service, "x", "b", 60_000).await.expect("claimed");
        let late = refused(&service, "x", release(&service, "x", "a", first)).await;
        assert_eq!((late.reason(), current(&late)), ("superseded", "in_progress"));
    }

    async fn a_release_counts_after_the_time_is_over_too(service) {
        let first = claim(&service, "x", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "x").await;
        release(&service, "x", "a", first).await.expect("released");
        release(&service, "x", "a", first).await.expect("released");
        // It was given back, so that there is nothing to recover.
        let second = claim(&service, "x", "b", 60_000).await.expect("claimed");
        assert_eq!(second.body.get("recovered"), None);
    }

    /// A late owner cleans up, and frees what its successor runs (`Truxify#4623`).
    async fn a_late_owner_frees_nothing(service) {
        let first = claim(&service, "x", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "x").await;
        let second = claim(&service, "x", "b", 60_000).await.expect("claimed").version();
        let late = refused(&service, "x", release(&service, "x", "a", first)).await;
        assert_eq!((late.reason(), current(&late)), ("superseded", "in_progress"));
        let third = claim(&service, "x", "c", 60_000).await.expect("already_in_progress");
        assert_eq!(third.body["holder"]["version"], second);
    }

    async fn what_was_released_cannot_complete(service) {
        let version = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        release(&service, "x", "a", version).await.expect("released");
        let late = refused(&service, "x", complete(&service, "x", "a", version, "1")).await;
        problem(&late, 409, "stale_lease");
        assert_eq!((late.reason(), current(&late)), ("released", "released"));
    }

    async fn what_was_completed_cannot_be_released(service) {
        let version = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        complete(&service, "x", "a", version, "1").await.expect("completed");
        let late = refused(&service, "x", release(&service, "x", "a", version)).await;
        problem(&late, 409, "already_completed");
        assert_eq!(current(&late), "completed");
        claim(&service, "x", "b", 60_000).await.expect("completed");
    }

    async fn a_claim_after_a_lapse_recovers_it(service) {
        let first = claim(&service, "x", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "x").await;
        let second = ask(&service, attempt("x", "b", BRIEF)).await.expect("claimed");
        assert_eq!(second.body["recovered"], true);
        assert_eq!(second.body["previous_version"], first);
        let again = ask(&service, attempt("x", "b", BRIEF)).await.expect("claimed");
        assert_eq!(again.body["recovered"], true);
        until_lapsed(&service, "x").await;
        let third = claim(&service, "x", "c", 60_000).await.expect("claimed");
        assert_eq!(third.body["previous_version"], second.version());
        release(&service, "x", "c", third.version()).await.expect("released");
        let fourth = claim(&service, "x", "d", 60_000).await.expect("claimed");
        assert_eq!(fourth.body.get("recovered"), None);
    }

    async fn a_repeated_attempt_gets_the_same_claim(service) {
        let first = ask(&service, attempt("x", "a", 60_000)).await.expect("claimed");
        let mut other = attempt("x", "a", 1_000);
        other["correlation_id"] = json!("another");
        other["wait_ms"] = json!(20_000);
        let again = ask(&service, other).await.expect("claimed");
        assert_eq!((&again.body["repeated"], &first.body["repeated"]), (&json!(true), &json!(false)));
        for name in ["version", "ttl_ms", "acquired_at", "expires_at"] {
            assert_eq!(again.body["lease"][name], first.body["lease"][name], "{name}");
        }
        assert_eq!(look(&service, "x").await.body.get("correlation_id"), None);
        ask(&service, attempt("x", "b", 60_000)).await.expect("already_in_progress");
    }

    async fn a_late_repeat_takes_nothing(service) {
        let first = ask(&service, attempt("x", "a", 60_000)).await.expect("claimed").version();
        release(&service, "x", "a", first).await.expect("released");
        let late = refused(&service, "x", ask(&service, attempt("x", "a", 60_000))).await;
        assert_eq!((late.reason(), current(&late)), ("released", "released"));
        ask(&service, attempt("y", "a", 60_000)).await.expect("claimed");
        force(&service, "y", None).await.expect("released");
        ask(&service, attempt("y", "a", 60_000)).await.expect_stale("revoked");
        ask(&service, attempt("z", "a", BRIEF)).await.expect("claimed");
        until_lapsed(&service, "z").await;
        for _ in 0..2 {
            ask(&service, attempt("z", "a", BRIEF)).await.expect_stale("expired");
        }
        // The next claim gets it, and is told of the loss.
        let next = claim(&service, "z", "b", 60_000).await.expect("claimed");
        assert_eq!(next.body["recovered"], true);
    }

    async fn a_repeat_after_the_completion_is_told_the_result(service) {
        let version = ask(&service, attempt("x", "a", 60_000)).await.expect("claimed").version();
        complete(&service, "x", "a", version, "1").await.expect("completed");
        let again = ask(&service, attempt("x", "a", 60_000)).await.expect("completed");
        assert_eq!(again.body["result"], 1);
    }

    async fn a_completion_is_told_to_all_who_wait(service) {
        let version = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        let waits: Vec<_> =
            (0..20).map(|n| attach(&service, "x", &format!("o{n}"), 50_000)).collect();
        service.until_waiters(20).await;
        let sent = Instant::now();
        let result = r#"{ "n":1.0 }"#;
        complete(&service, "x", "a", version, result).await.expect("completed");
        for wait in waits {
            let told = wait.await.unwrap().expect("completed");
            assert_eq!((text_of(&told, "result").as_str(), &told.body["version"]),
                       (result, &json!(version)));
        }
        assert!(sent.elapsed() < PROMPT, "{:?}", sent.elapsed());
        service.until_waiters(0).await;
    }

    async fn on_release_one_of_those_who_wait_claims(service) {
        let began = Instant::now();
        let first = claim(&service, "x", "o", 60_000).await.expect("claimed").version();
        let mut waits = JoinSet::new();
        for n in 0..20 {
            let wait = attach(&service, "x", &format!("o{n}"), 50_000);
            waits.spawn(async move { (format!("o{n}"), wait.await.unwrap()) });
        }
        service.until_waiters(20).await;
        release(&service, "x", "o", first).await.expect("released");
        let (owner, granted) = waits.join_next().await.unwrap().unwrap();
        let granted = granted.expect("claimed");
        assert_eq!(granted.body.get("recovered"), None);
        service.until_waiters(19).await;
        let held = claim(&service, "x", "other", 60_000).await.expect("already_in_progress");
        assert_eq!(held.body["holder"]["version"], granted.version());
        complete(&service, "x", &owner, granted.version(), "7").await.expect("completed");
        for (_, told) in waits.join_all().await {
            assert_eq!(told.expect("completed").body["result"], 7);
        }
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
    }

    async fn on_lapse_one_who_waits_claims_and_recovers(service) {
        let first = claim(&service, "x", "a", 700).await.expect("claimed");
        let waits = [attach(&service, "x", "b", 50_000), attach(&service, "x", "c", 50_000)];
        let mut line = JoinSet::new();
        for wait in waits {
            line.spawn(async move { wait.await.unwrap() });
        }
        let granted = line.join_next().await.unwrap().unwrap().expect("claimed");
        assert_eq!((&granted.body["recovered"], &granted.body["previous_version"]),
                   (&json!(true), &json!(first.version())));
        let acquired_at = millis(&granted.body["lease"]["acquired_at"]);
        assert!(acquired_at >= millis(&first.body["lease"]["expires_at"]));
        let owner = granted.body["lease"]["owner_id"].as_str().unwrap();
        complete(&service, "x", owner, granted.version(), "1").await.expect("completed");
        line.join_next().await.unwrap().unwrap().expect("completed");
    }

    async fn on_a_forced_release_one_who_waits_claims_and_recovers(service) {
        let first = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        let wait = attach(&service, "x", "b", 50_000);
        service.until_waiters(1).await;
        let sent = Instant::now();
        force(&service, "x", Some(first)).await.expect("released");
        assert_eq!(wait.await.unwrap().expect("claimed").body["previous_version"], first);
        assert!(sent.elapsed() < PROMPT);
    }

    async fn a_wait_that_runs_out_is_told_that_it_is_in_progress(service) {
        let first = claim(&service, "x", "a", 60_000).await.expect("claimed");
        let sent = Instant::now();
        let told = attach(&service, "x", "b", 700).await.unwrap().expect("already_in_progress");
        assert!(sent.elapsed() >= Duration::from_millis(700));
        assert!(told.body["elapsed_ms"].as_i64().unwrap() >= 700);
        assert_eq!(told.body["holder"]["version"], first.version());
        assert!(told.body["retry_after_ms"].as_i64().unwrap() <= 1_000);
        // Nobody in line takes it later.
        release(&service, "x", "a", first.version()).await.expect("released");
        assert_eq!(standing(&service, "x").await["state"], "released");
    }

    async fn a_wait_on_what_does_not_run_ends_at_once(service) {
        let sent = Instant::now();
        let granted = attach(&service, "x", "a", 50_000).await.unwrap().expect("claimed");
        complete(&service, "x", "a", granted.version(), "1").await.expect("completed");
        attach(&service, "x", "a", 50_000).await.unwrap().expect("completed");
        assert!(sent.elapsed() < PROMPT);
    }

    async fn who_leaves_the_line_is_granted_nothing(service) {
        let first = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        let waits: Vec<_> = (0..5).map(|_| attach(&service, "x", "b", 50_000)).collect();
        service.until_waiters(5).await;
        waits.iter().for_each(JoinHandle::abort);
        service.until_waiters(0).await;
        release(&service, "x", "a", first).await.expect("released");
        let state = standing(&service, "x").await;
        assert_eq!((&state["state"], &state["version"]), (&json!("released"), &json!(first)));
    }

    async fn a_draining_replica_claims_nothing_and_lets_others_finish(service) {
        let version = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        let waits: Vec<_> = (0..5).map(|_| attach(&service, "x", "b", 50_000)).collect();
        service.until_waiters(5).await;
        service.app.coordinator.drain();
        for wait in waits {
            problem(&wait.await.unwrap(), 503, "shutting_down");
        }
        problem(&claim(&service, "y", "a", 60_000).await, 503, "shutting_down");
        complete(&service, "x", "a", version, "1").await.expect("completed");
        assert_eq!(look(&service, "y").await.body["state"], "absent");
    }

    async fn a_state_tells_where_an_execution_is(service) {
        let absent = json!({"execution_id": "x", "state": "absent"});
        assert_eq!(look(&service, "x").await.body, absent);
        let first = claim(&service, "x", "a", BRIEF).await.expect("claimed");
        let running = look(&service, "x").await.body;
        assert_eq!(names(&running), ["acquired_at", "execution_id", "expires_at", "expires_in_ms",
                                     "intent", "owner_id", "reclaimable", "state", "version"]);
        assert_eq!((&running["state"], &running["intent"]), (&json!("in_progress"), &json!("i")));
        for name in ["acquired_at", "expires_at", "owner_id", "version"] {
            assert_eq!(running[name], first.body["lease"][name], "{name}");
        }
        until_lapsed(&service, "x").await;
        let lapsed = look(&service, "x").await.body;
        assert_eq!((&lapsed["state"], &lapsed["reclaimable"]), (&json!("in_progress"), &json!(true)));
        assert_eq!(lapsed["expires_in_ms"], 0);
        release(&service, "x", "a", first.version()).await.expect("released");
        let released = look(&service, "x").await.body;
        assert_eq!((&released["state"], &released["version"]),
                   (&json!("released"), &json!(first.version())));
        for name in ["reclaimable", "expires_at", "expires_in_ms", "result", "completed_at"] {
            assert_eq!(released.get(name), None, "{name}");
        }
        let second = claim(&service, "x", "b", 60_000).await.expect("claimed").version();
        complete(&service, "x", "b", second, "[1, 2]").await.expect("completed");
        let done = look(&service, "x").await;
        no_nulls(&done.body);
        assert_eq!(names(&done.body), ["acquired_at", "completed_at", "execution_id", "intent",
                                       "owner_id", "result", "state", "version"]);
        assert_eq!(text_of(&done, "result"), "[1, 2]");
        assert_eq!((&done.body["state"], &done.body["version"]), (&json!("completed"), &json!(second)));
    }

    async fn a_list_shows_each_as_its_state_does_but_for_the_result(service) {
        let done = claim(&service, "a done", "a", 60_000).await.expect("claimed").version();
        complete(&service, "a done", "a", done, "[1]").await.expect("completed");
        claim(&service, "b runs", "a", 60_000).await.expect("claimed");
        let freed = claim(&service, "c freed", "a", 60_000).await.expect("claimed").version();
        release(&service, "c freed", "a", freed).await.expect("released");
        let null = claim(&service, "d null", "a", 60_000).await.expect("claimed").version();
        complete(&service, "d null", "a", null, "null").await.expect("completed");
        claim(&service, "e lapsed", "a", BRIEF).await.expect("claimed");
        until_lapsed(&service, "e lapsed").await;
        let ids = ["a done", "b runs", "c freed", "d null", "e lapsed"];
        let list = service.get("/v1/executions").await;
        let items = list.body["items"].as_array().unwrap();
        assert_eq!(items.len(), ids.len());
        for (item, id) in items.iter().zip(ids) {
            let mut state = standing(&service, id).await;
            state.as_object_mut().unwrap().remove("result");
            assert_eq!(at_rest(item.clone()), state);
            assert_eq!(item.get("result"), None);
        }
        let list = async |query: &[(&str, &str)]| {
            let list = service.get_with("/v1/executions", query).await;
            assert_eq!(list.status, 200, "{list:#?}");
            let items = list.body["items"].as_array().unwrap().clone();
            let ids = items.iter().map(|item| item["execution_id"].as_str().unwrap().to_owned());
            (ids.collect::<Vec<_>>(), list.body.get("next_page_token").cloned())
        };
        assert_eq!(list(&[("state", "completed")]).await.0, ["a done", "d null"]);
        assert_eq!(list(&[("state", "in_progress")]).await.0, ["b runs", "e lapsed"]);
        assert_eq!(list(&[("state", "released")]).await.0, ["c freed"]);
        assert_eq!(list(&[("prefix", "c")]).await.0, ["c freed"]);
        assert_eq!(list(&[("prefix", "c"), ("state", "completed")]).await.0, [""; 0]);
        let (mut all, mut token) = list(&[("limit", "2")]).await;
        while let Some(given) = token {
            let page = list(&[("limit", "2"), ("page_token", given.as_str().unwrap())]).await;
            assert!(page.0.len() <= 2);
            all.extend(page.0);
            token = page.1;
        }
        assert_eq!(all, ids);
        for state in ["absent", "held", "COMPLETED", ""] {
            let reply = service.get_with("/v1/executions", &[("state", state)]).await;
            assert_eq!(wrong_members(&reply), ["state"], "{state}");
        }
    }

    async fn ids_are_compared_byte_by_byte(service) {
        for id in ODD_KEYS {
            let granted = claim(&service, id, "a", 60_000).await.expect("claimed");
            let result = json!(id).to_string();
            complete(&service, id, "a", granted.version(), &result).await.expect("completed");
        }
        for id in ODD_KEYS {
            let told = claim(&service, id, "b", 60_000).await.expect("completed");
            assert_eq!(told.body["result"], *id);
            assert_eq!(look(&service, id).await.body["execution_id"], *id);
        }
    }

    async fn a_forced_release_frees_what_runs_and_nothing_else(service) {
        force(&service, "never", None).await.expect("not_held");
        let first = claim(&service, "x", "a", 60_000).await.expect("claimed").version();
        for other in [first - 1, first + 1] {
            let told = force(&service, "x", Some(other)).await.expect("not_held");
            assert_eq!(told.body, json!({"outcome": "not_held"}));
        }
        let freed = force(&service, "x", Some(first)).await.expect("released");
        assert_eq!(freed.body, json!({"outcome": "released", "version": first}));
        assert_eq!(standing(&service, "x").await["state"], "released");
        let late = refused(&service, "x", complete(&service, "x", "a", first, "1")).await;
        assert_eq!((late.reason(), current(&late)), ("revoked", "released"));
        release(&service, "x", "a", first).await.expect_stale("revoked");
        force(&service, "x", None).await.expect("not_held");
        let second = claim(&service, "x", "b", 60_000).await.expect("claimed");
        assert_eq!(second.body["previous_version"], first);
        assert!(second.version() > first);
        complete(&service, "x", "b", second.version(), "1").await.expect("completed");
        force(&service, "x", None).await.expect("not_held");
        force(&service, "x", Some(second.version())).await.expect("not_held");
        claim(&service, "x", "c", 60_000).await.expect("completed");
        let lapsed = claim(&service, "y", "a", BRIEF).await.expect("claimed").version();
        until_lapsed(&service, "y").await;
        // Its owner could still complete, so it can be freed, too.
        force(&service, "y", None).await.expect("released");
        complete(&service, "y", "a", lapsed, "1").await.expect_stale("revoked");
        let reply = service.post("/v1/executions/force-release", json!({"execution_id": "x"})).await;
        assert_eq!(wrong_members(&reply), ["reason"]);
    }

    async fn many_are_claimed_and_completed_in_order_each_by_itself(service) {
        let running = claim(&service, "runs", "o", 60_000).await.expect("claimed").version();
        let done = claim(&service, "done", "o", 60_000).await.expect("claimed").version();
        complete(&service, "done", "o", done, r#"{"b": 1, "a":1.0}"#).await.expect("completed");
        let gone = ask(&service, attempt("gone", "a", 60_000)).await.expect("claimed").version();
        release(&service, "gone", "a", gone).await.expect("released");
        let claims = json!({"items": [
            wish("new", "i", "a", 60_000), wish("runs", "i", "a", 60_000),
            wish("done", "i", "a", 60_000), wish("done", "j", "a", 60_000),
            attempt("gone", "a", 60_000), attempt("other", "a", 60_000),
            {"execution_id": "plain", "intent": "i", "owner_id": "a"},
        ]});
        let reply = service.post("/v1/executions/claim-many", claims).await;
        assert_eq!(reply.status, 200, "{reply:#?}");
        assert_eq!(names(&reply.body), ["elapsed_ms", "results"]);
        no_nulls(&reply.body);
        assert!(reply.text.contains(r#""result":{"b": 1, "a":1.0}"#), "{}", reply.text);
        let results = reply.body["results"].as_array().unwrap();
        let outcomes: Vec<_> = results.iter().map(|r| r["outcome"].as_str().unwrap()).collect();
        assert_eq!(outcomes, ["claimed", "already_in_progress", "completed", "intent_conflict",
                              "stale_lease", "claimed", "claimed"]);
        assert_eq!(results[0]["lease"]["execution_id"], "new");
        assert_eq!(results[1]["holder"]["version"], running);
        assert_eq!(results[2]["version"], done);
        assert_eq!(results[4], json!({"outcome": "stale_lease", "execution_id": "gone",
                                      "reason": "released"}));
        assert_eq!(results[6]["lease"]["ttl_ms"], 30_000);
        let new = results[0]["lease"]["version"].as_i64().unwrap();
        let item = |id, owner, version, result: Value| {
            let mut item = reference(id, owner, version);
            item["result"] = result;
            item
        };
        let completions = json!({"items": [
            item("new", "a", new, json!(null)), item("runs", "a", running, json!(1)),
            item("done", "o", done, json!(1)), item("never", "a", 1, json!(1)),
            item("gone", "a", gone, json!(1)),
        ]});
        let reply = service.post("/v1/executions/complete-many", completions).await;
        assert_eq!(reply.status, 200, "{reply:#?}");
        let stale = |id, reason| {
            json!({"outcome": "stale_lease", "execution_id": id, "reason": reason})
        };
        assert_eq!(reply.body["results"], json!([
            {"outcome": "completed"}, stale("runs", "unknown"),
            {"outcome": "already_completed", "execution_id": "done"},
            stale("never", "unknown"), stale("gone", "released"),
        ]));
        let told = claim(&service, "new", "b", 60_000).await.expect("completed");
        assert_eq!(text_of(&told, "result"), "null");
        claim(&service, "runs", "b", 60_000).await.expect("already_in_progress");
    }

    async fn duplicates_in_one_batch_have_one_result_each(service) {
        let claims = json!({"items": [
            wish("x", "i", "a", 60_000), wish("x", "i", "a", 60_000), wish("x", "i", "b", 60_000),
            attempt("y", "a", 60_000), attempt("y", "a", 60_000), wish("x", "j", "a", 60_000),
        ]});
        let reply = service.post("/v1/executions/claim-many", claims).await;
        let results = reply.body["results"].as_array().unwrap();
        let outcomes: Vec<_> = results.iter().map(|r| r["outcome"].as_str().unwrap()).collect();
        assert_eq!(outcomes, ["claimed", "already_in_progress", "already_in_progress", "claimed",
                              "claimed", "intent_conflict"]);
        assert_eq!((&results[3]["repeated"], &results[4]["repeated"]), (&json!(false), &json!(true)));
        let version = results[0]["lease"]["version"].as_i64().unwrap();
        let mut item = reference("x", "a", version);
        item["result"] = json!(1);
        let mut other = item.clone();
        other["result"] = json!(2);
        let completions = json!({"items": [item, item, other]});
        let reply = service.post("/v1/executions/complete-many", completions).await;
        assert_eq!(reply.body["results"], json!([
            {"outcome": "completed"}, {"outcome": "completed"},
            {"outcome": "already_completed", "execution_id": "x"},
        ]));
    }

    async fn a_thousand_go_into_one_batch(service) {
        let items: Vec<_> =
            (0..1_000).map(|n| wish(&format!("x{n}"), "i", "a", 60_000)).collect();
        let reply = service.post("/v1/executions/claim-many", json!({"items": items})).await;
        let results = reply.body["results"].as_array().unwrap();
        let completions: Vec<_> = results.iter().enumerate().map(|(n, result)| {
            assert_eq!(result["outcome"], "claimed");
            assert_eq!(result["lease"]["execution_id"], format!("x{n}"));
            let version = result["lease"]["version"].as_i64().unwrap();
            let mut item = reference(&format!("x{n}"), "a", version);
            item["result"] = json!(n);
            item
        }).collect();
        let reply =
            service.post("/v1/executions/complete-many", json!({"items": completions})).await;
        let results = reply.body["results"].as_array().unwrap();
        assert!(results.len() == 1_000 && results.iter().all(|r| r["outcome"] == "completed"));
        let reply = service.post("/v1/executions/claim-many", json!({"items": items})).await;
        for (n, result) in reply.body["results"].as_array().unwrap().iter().enumerate() {
            assert_eq!((&result["outcome"], &result["result"]), (&json!("completed"), &json!(n)));
        }
    }

    /// Batches that name the same keys in opposite orders must not lock each other out
    /// (`janbjorge/pgqueuer#170`, `TkTech/chancy#89`).
    async fn batches_in_opposite_orders_all_end(service) {
        let mut clients = JoinSet::new();
        for n in 0..8 {
            let client = service.client.clone();
            clients.spawn(async move {
                for round in 0..15 {
                    let mut ids: Vec<String> = (0..20).map(|k| format!("x{round}-{k}")).collect();
                    if n % 2 == 1 {
                        ids.reverse();
                    }
                    let owner = format!("o{n}");
                    let items: Vec<_> = ids.iter().map(|id| wish(id, "i", &owner, 60_000)).collect();
                    let body = json!({"items": items});
                    let reply = client.post("/v1/executions/claim-many", body).await;
                    assert_eq!(reply.status, 200, "{reply:#?}");
                    let results = reply.body["results"].as_array().unwrap();
                    let done: Vec<_> = results.iter().zip(&ids).filter_map(|(result, id)| {
                        match result["outcome"].as_str().unwrap() {
                            "claimed" => {
                                let version = result["lease"]["version"].as_i64().unwrap();
                                let mut item = reference(id, &owner, version);
                                item["result"] = json!(n);
                                Some(item)
                            }
                            "already_in_progress" | "completed" => None,
                            other => panic!("{other}"),
                        }
                    }).collect();
                    if done.is_empty() {
                        continue;
                    }
                    let body = json!({"items": done});
                    let reply = client.post("/v1/executions/complete-many", body).await;
                    let results = reply.body["results"].as_array().unwrap();
                    assert!(results.iter().all(|r| r["outcome"] == "completed"), "{reply:#?}");
                }
            });
        }
        clients.join_all().await;
        let done = service.get_with("/v1/executions", &[("state", "completed"), ("limit", "1000")]);
        assert_eq!(done.await.body["items"].as_array().unwrap().len(), 300);
    }

    async fn executions_leases_and_responses_of_one_name_do_not_meet(service) {
        let version = claim(&service, "k", "a", 60_000).await.expect("claimed").version();
        service.claim("k", "a", 60_000).await.expect("claimed");
        let body = json!({"key": "k", "owner_id": "a"});
        service.post("/v1/idempotency/claim", body).await.expect("claimed");
        complete(&service, "k", "a", version, "1").await.expect("completed");
        assert_eq!(service.state("k").await["state"], "held");
        let state = service.get_with("/v1/idempotency/state", &[("key", "k")]).await;
        assert_eq!(state.body["state"], "in_progress");
        assert_eq!(service.get("/v1/leases").await.body["items"].as_array().unwrap().len(), 1);
        assert_eq!(service.get("/v1/executions").await.body["items"].as_array().unwrap().len(), 1);
    }

    async fn requests_are_read_strictly(service) {
        let whole = wish("x", "i", "a", 60_000);
        for (name, value) in [
            ("execution_id", json!("")), ("execution_id", json!("é".repeat(257))),
            ("execution_id", json!("a\nb")), ("intent", json!("")), ("intent", json!("i".repeat(513))),
            ("intent", json!(1)), ("owner_id", json!("")), ("owner_id", json!("o".repeat(257))),
            ("correlation_id", json!("")), ("correlation_id", json!("c".repeat(257))),
            ("ttl_ms", json!(99)), ("ttl_ms", json!(86_400_001)), ("ttl_ms", json!(1_000.0)),
            ("ttl_ms", json!("1000")), ("attempt_id", json!("1")), ("wait_ms", json!(-1)),
            ("wait_ms", json!(50_001)), ("metadata", json!({})), ("key", json!("x")),
            ("scope", json!("")), ("fingerprint", json!("f")),
        ] {
            let mut body = whole.clone();
            body[name] = value;
            assert_eq!(wrong_members(&ask(&service, body).await), [name]);
        }
        let empty = ask(&service, json!({})).await;
        assert_eq!(wrong_members(&empty), ["execution_id", "intent", "owner_id"]);
        let nulls = json!({"execution_id": "n", "intent": "i", "owner_id": "a", "ttl_ms": null,
                           "correlation_id": null, "attempt_id": null, "wait_ms": null});
        ask(&service, nulls).await.expect("claimed");
        let mut item = whole.clone();
        item["wait_ms"] = json!(0);
        let body = json!({"items": [whole, item, {"execution_id": "x"}]});
        let reply = service.post("/v1/executions/claim-many", body).await;
        assert_eq!(wrong_members(&reply), ["items[1].wait_ms", "items[2].intent", "items[2].owner_id"]);
        for path in ["claim-many", "complete-many"] {
            let path = format!("/v1/executions/{path}");
            let many = vec![json!({}); 1_001];
            for items in [json!([]), json!(many), json!({}), json!("x"), json!(null)] {
                let reply = service.post(&path, json!({"items": items})).await;
                assert_eq!(wrong_members(&reply), ["items"]);
            }
            let large = format!("{{\"items\":[],\"x\":\"{}\"}}", "x".repeat(1 << 20));
            problem(&service.post_raw(&path, large).await, 413, "payload_too_large");
        }
        for path in ["complete", "release"] {
            for version in [json!(0), json!(-1), json!(1_i64 << 53), json!(1.0), json!("1")] {
                let mut body = json!({"execution_id": "x", "owner_id": "a", "version": version});
                if path == "complete" {
                    body["result"] = json!(1);
                }
                let reply = service.post(&format!("/v1/executions/{path}"), body).await;
                assert_eq!(wrong_members(&reply), ["version"]);
            }
        }
        for path in ["/v1/executions/renew", "/v1/executions/wait"] {
            problem(&service.post(path, json!({})).await, 404, "route_not_found");
        }
        assert_eq!(look(&service, "x").await.body["state"], "absent");
    }

    async fn what_is_not_done_is_never_cleaned_up_and_what_is_done_only_if_configured(service) {
        let kind = service.world().kind;
        let world = World::new(kind).await;
        let options = |retention| CoordinatorOptions {
            idle_key_retention: Duration::ZERO,
            cleanup_interval: Duration::from_millis(20),
            execution_retention: retention,
            ..CoordinatorOptions::default()
        };
        let forgetful = world.serve(options(Retention::from_millis(1_000))).await;
        let client = &forgetful.client;
        let freed = claim(client, "freed", "a", 60_000).await.expect("claimed").version();
        release(client, "freed", "a", freed).await.expect("released");
        claim(client, "lapsed", "a", BRIEF).await.expect("claimed");
        until_lapsed(client, "lapsed").await;
        let done = claim(client, "done", "a", 60_000).await.expect("claimed").version();
        complete(client, "done", "a", done, "1").await.expect("completed");
        // Gone from the store, not only from sight.
        eventually(|| async { client.metric("fencepost_cleaned_keys_total").await >= 1.0 }).await;
        assert_eq!(look(client, "done").await.body["state"], "absent");
        ask(client, wish("freed", "j", "b", 60_000)).await.expect("intent_conflict");
        ask(client, wish("lapsed", "j", "b", 60_000)).await.expect("intent_conflict");
        let anew = ask(client, wish("done", "j", "b", 60_000)).await.expect("claimed");
        assert!(anew.version() > done);
        assert_eq!(anew.body.get("recovered"), None);
    }

    async fn runs_and_results_outlive_a_restart(service) {
        let kind = service.world().kind;
        if kind == Kind::Memory {
            return;
        }
        let world = World::new(kind).await;
        let service = world.serve(CoordinatorOptions::default()).await;
        let version = claim(&service, "runs", "a", 60_000).await.expect("claimed").version();
        let done = claim(&service, "done", "a", 60_000).await.expect("claimed").version();
        let result = r#"{"z": 1,"a":1.0, "a":2}"#;
        complete(&service, "done", "a", done, result).await.expect("completed");
        service.stop().await;
        let service = world.serve(CoordinatorOptions::default()).await;
        claim(&service, "runs", "b", 60_000).await.expect("already_in_progress");
        complete(&service, "runs", "a", version, "1").await.expect("completed");
        let told = claim(&service, "done", "b", 60_000).await.expect("completed");
        assert_eq!(text_of(&told, "result"), result);
        complete(&service, "done", "a", done, result).await.expect("completed");
    }

    /// A crash costs at most the lease.
    async fn after_a_crash_the_next_claim_waits_at_most_for_the_lease_and_recovers(service) {
        let kind = service.world().kind;
        if kind == Kind::Memory {
            return;
        }
        let world = World::new(kind).await;
        let crashing = Process::start(&world.url(), &[]);
        let first = claim(&crashing, "x", "a", 2_000).await.expect("claimed");
        crashing.kill();
        let service = world.serve(CoordinatorOptions::default()).await;
        let next = attach(&service, "x", "b", 50_000).await.unwrap().expect("claimed");
        assert_eq!((&next.body["recovered"], &next.body["previous_version"]),
                   (&json!(true), &json!(first.version())));
        let ended = millis(&first.body["lease"]["expires_at"]);
        let began = millis(&next.body["lease"]["acquired_at"]);
        assert!(began >= ended, "{began} {ended}");
        println!("figure: after a crash on {kind:?}, recovered {} ms after the lease", began - ended);
        assert!(began - ended < 20_000);
        complete(&service, "x", "b", next.version(), "1").await.expect("completed");
    }
}

/// Losers of the first claim are told to wait, not to fail (`idempot-dev/idempot-js#181`).
#[tokio::test(flavor = "multi_thread")]
async fn of_fifty_first_claims_over_two_replicas_one_runs_and_none_fails() {
    const KEYS: usize = 200;
    const CLAIMS: usize = 50;
    let world = World::new(Kind::Postgres).await;
    let replicas = [
        world.serve(CoordinatorOptions::default()).await,
        world.serve(CoordinatorOptions::default()).await,
    ];
    let began = Instant::now();
    let mut slowest = Duration::ZERO;
    for chunk in (0..KEYS).collect::<Vec<_>>().chunks(10) {
        let mut claims = JoinSet::new();
        for &key in chunk {
            for n in 0..CLAIMS {
                let client = replicas[n % 2].client.clone();
                claims.spawn(async move {
                    let sent = Instant::now();
                    let id = format!("x{key}");
                    let reply = claim(&client, &id, &format!("o{n}"), 60_000).await;
                    (key, reply, sent.elapsed())
                });
            }
        }
        let mut told: HashMap<usize, HashMap<String, usize>> = HashMap::new();
        for (key, reply, took) in claims.join_all().await {
            assert_eq!(reply.status, 200, "{reply:#?}");
            *told.entry(key).or_default().entry(reply.outcome().to_owned()).or_default() += 1;
            slowest = slowest.max(took);
        }
        let expected = HashMap::from([
            ("claimed".to_owned(), 1),
            ("already_in_progress".to_owned(), CLAIMS - 1),
        ]);
        for (key, outcomes) in told {
            assert_eq!(outcomes, expected, "x{key}");
        }
    }
    println!(
        "figure: {KEYS} executions, {CLAIMS} first claims each, two replicas on Postgres: one \
         claimed each, no 5xx, {:?} in all, slowest claim {slowest:?}",
        began.elapsed()
    );
}

/// A completion on one replica is told at once to those who wait on another.
#[tokio::test(flavor = "multi_thread")]
async fn a_completion_reaches_those_who_wait_on_another_replica() {
    let world = World::new(Kind::Postgres).await;
    let here = world.serve(CoordinatorOptions::default()).await;
    let there = world.serve(CoordinatorOptions::default()).await;
    let began = Instant::now();
    for round in 0..10 {
        let id = format!("x{round}");
        let version = claim(&here, &id, "a", 60_000).await.expect("claimed").version();
        let waits: Vec<_> = (0..5).map(|_| attach(&there, &id, "b", 50_000)).collect();
        there.until_waiters(5).await;
        complete(&here, &id, "a", version, "1").await.expect("completed");
        for wait in waits {
            wait.await.unwrap().expect("completed");
        }
        there.until_waiters(0).await;
    }
    assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
}

/// Each outcome is true at some moment within the call: of claims that race with completions and
/// releases, nobody is told of a state that cannot have been (`margince#423`).
#[tokio::test(flavor = "multi_thread")]
async fn what_racing_claims_are_told_fits_one_history() {
    let service = Service::start(Kind::Postgres).await;
    for round in 0..10 {
        let id = format!("x{round}");
        let mut clients = JoinSet::new();
        for n in 0..8 {
            let (client, id) = (service.client.clone(), id.clone());
            clients.spawn(async move {
                let intent = if n < 6 { "i" } else { "j" };
                let owner = format!("o{n}");
                let mut granted = 0;
                loop {
                    let reply = ask(&client, wish(&id, intent, &owner, 60_000)).await;
                    match reply.outcome() {
                        "claimed" => {
                            let version = reply.version();
                            granted += 1;
                            if granted < 3 {
                                release(&client, &id, &owner, version).await.expect("released");
                            } else {
                                let result = json!([intent, version]).to_string();
                                complete(&client, &id, &owner, version, &result)
                                    .await
                                    .expect("completed");
                            }
                        }
                        "already_in_progress" => {}
                        "completed" => {
                            let version = reply.body["version"].clone();
                            assert_eq!(reply.body["result"], json!([intent, version]));
                            return (intent, Some(reply.body["result"].clone()));
                        }
                        "intent_conflict" => return (intent, None),
                        _ => panic!("{reply:#?}"),
                    }
                }
            });
        }
        let ends = clients.join_all().await;
        let bound = ends.iter().find(|(_, result)| result.is_some()).unwrap().clone();
        for (intent, result) in ends {
            assert_eq!(result, bound.1.clone().filter(|_| intent == bound.0), "{intent}");
        }
    }
}
