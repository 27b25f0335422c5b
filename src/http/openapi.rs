//! The OpenAPI documents: 3.1, and a 3.0.3 profile of it for SDK generators that know no better.
//!
//! Both are made from the handlers. What the derive macros cannot say is put right here once, for
//! the whole document, instead of at each member.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{ContentBuilder, Ref, RefOr, Response};
use utoipa::{IntoResponses, OpenApi};

use super::problem::ProblemBody;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Fencepost",
        description = "Coordinates processes over the Postgres they already have, or over an \
            embedded file: fenced leases.\n\nAn outcome is a value, an error is a problem: asking \
            answers 200 with an `outcome`, whoever wins. `outcome`, `state`, `reason` and `code` \
            are open: expect values that this document does not name. Durations are milliseconds; \
            instants are RFC 3339 in UTC, by the store's clock. `version` is the fencing token.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
        contact(name = "The Fencepost project", url = "https://example.com/fencepost")
    ),
    servers((url = "/", description = "Where this document came from")),
    tags(
        (name = "leases", description = "Who may do the downstream work for a key"),
        (name = "operations", description = "Health, limits and figures of the service")
    ),
    components(schemas(ProblemBody))
)]
pub(super) struct Api;

/// The problems that every operation with a body can answer.
pub(super) struct Problems;

/// The problems that every operation without a body can answer.
pub(super) struct ReadProblems;

/// The problem of a caller that does not hold what it refers to.
pub(super) struct OwnershipLost;

fn problem(description: &str, with_retry_after: bool) -> RefOr<Response> {
    let header = |kind, description: &str| {
        let schema = ObjectBuilder::new().schema_type(kind).build();
        HeaderBuilder::new().schema(Some(schema)).description(Some(description)).build()
    };
    let schema = Ref::from_schema_name("Problem");
    let mut response = ResponseBuilder::new()
        .description(description)
        .content(PROBLEM, ContentBuilder::new().schema(Some(schema)).build())
        .header("X-Request-Id", header(Type::String, "As sent by the caller, else made up"));
    if with_retry_after {
        let retry_after = header(Type::Integer, "Whole seconds, at least 1");
        response = response.header("Retry-After", retry_after);
    }
    RefOr::T(response.build())
}

const PROBLEM: &str = "application/problem+json";

fn problems(of: &[(&str, &str)]) -> BTreeMap<String, RefOr<Response>> {
    of.iter().map(|&(status, text)| (status.to_owned(), problem(text, status == "503"))).collect()
}

const INVALID: (&str, &str) = (
    "400",
    "`invalid_json` or `invalid_request`: the request is wrong; `errors` names each member.",
);
const INTERNAL: (&str, &str) = ("500", "`internal`: a bug; the log has more.");
const AWAY: (&str, &str) = (
    "503",
    "`unavailable`: the store did not answer in time, so the outcome is not known. \
     `shutting_down`: certainly not applied; ask another replica.",
);

impl IntoResponses for Problems {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        problems(&[
            INVALID,
            ("413", "`payload_too_large`: nothing was changed."),
            ("415", "`unsupported_media_type`: send `content-type: application/json`."),
            INTERNAL,
            AWAY,
        ])
    }
}

impl IntoResponses for ReadProblems {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        problems(&[INVALID, INTERNAL, AWAY])
    }
}

impl IntoResponses for OwnershipLost {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        problems(&[("409", "`stale_lease`: the caller does not hold the key; `reason` tells why.")])
    }
}

/// Both documents, as they are served and committed.
#[derive(Debug)]
pub struct Documents {
    /// OpenAPI 3.1.
    pub v3_1: String,
    /// The OpenAPI 3.0.3 profile.
    pub v3_0: String,
}

impl Documents {
    pub(super) fn of(api: &utoipa::openapi::OpenApi) -> Self {
        let mut document = serde_json::to_value(api).unwrap_or_default();
        document["security"] = json!([]);
        if let Some(schemas) = document["components"]["schemas"].as_object_mut() {
            let requests = schemas.iter_mut().filter(|(name, _)| name.ends_with("Request"));
            requests.for_each(|(_, schema)| schema["additionalProperties"] = json!(false));
        }
        tidy(&mut document);
        let v3_1 = pretty(&document);
        let v3_0 = pretty(&sdk_profile(document));
        Self { v3_1, v3_0 }
    }
}

fn pretty(document: &Value) -> String {
    serde_json::to_string_pretty(document).unwrap_or_default() + "\n"
}

/// Absent is absent here, never `null`; and parameters have examples, not schemas.
fn tidy(value: &mut Value) {
    match value {
        Value::Object(members) => {
            if let Some(Value::Array(types)) = members.get_mut("type") {
                types.retain(|kind| kind != "null");
                if let [only] = types.as_slice() {
                    let only = only.clone();
                    members.insert("type".to_owned(), only);
                }
            }
            if let Some(Value::Array(options)) = members.get_mut("oneOf") {
                options.retain(|option| *option != json!({"type": "null"}));
                if let [Value::Object(only)] = options.as_slice() {
                    let only = only.clone();
                    members.remove("oneOf");
                    members.extend(only);
                }
            }
            members.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// The same wire in the words of OpenAPI 3.0.3.
fn sdk_profile(mut document: Value) -> Value {
    document["openapi"] = json!("3.0.3");
    document["info"]["license"] = json!({
        "name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"
    });
    let open = |schema: &mut Value| {
        if schema.get("properties").is_some() && schema.get("additionalProperties").is_none() {
            schema["additionalProperties"] = json!(true);
        }
    };
    if let Some(schemas) = document["components"]["schemas"].as_object_mut() {
        schemas.values_mut().for_each(open);
    }
    downgrade(&mut document);
    document
}

fn downgrade(value: &mut Value) {
    match value {
        Value::Object(members) => {
            if let Some(content) = members.remove(PROBLEM) {
                // Generators take the media type they know; clients get the problem either way.
                members.insert("application/json".to_owned(), content);
            }
            // A reference stands alone in 3.0; its siblings are lost, so they are wrapped.
            if members.contains_key("$ref") && members.len() > 1 {
                let reference = members.remove("$ref").unwrap_or_default();
                members.insert("allOf".to_owned(), json!([{ "$ref": reference }]));
            }
            // Not in 3.0; says of maps what JSON says anyway.
            members.remove("propertyNames");
            unlist_examples(members);
            members.values_mut().for_each(downgrade);
        }
        Value::Array(items) => items.iter_mut().for_each(downgrade),
        _ => {}
    }
}

/// In schemas, `examples` is a list that 3.0 does not know.
fn unlist_examples(members: &mut Map<String, Value>) {
    if let Some(Value::Array(examples)) = members.get_mut("examples") {
        let first = examples.drain(..).next().unwrap_or_default();
        members.remove("examples");
        members.insert("example".to_owned(), first);
    }
}
