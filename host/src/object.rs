//! A Kubernetes object as the host keeps it: the raw JSON, and of its metadata just what the host decides by.
//!
//! Built once, when the object arrives from the API server. `metadata.managedFields` is taken out on the way, since plugins have
//! no use for it and it is often half of the object; of it only our own entries are kept, for the no-op rule, and the names of the others;
//! on children also what others have beside us, which is little, to tell what an apply has taken from them.

use std::{
    borrow::Cow,
    cmp::Ordering,
    collections::BTreeMap,
    fmt,
    sync::{Arc, OnceLock},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client, Resource, core::DynamicResourceScope, discovery::ApiResource};
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::value::RawValue;

use crate::{identity, plugin::describe::KindName};

/// The first part of every field manager of ours; see [`crate::identity`].
pub const FIELD_MANAGER_PREFIX: &str = "pilothouse/";

/// Where an object is: unique within its kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// None for an object of cluster scope.
    pub namespace: Option<String>,
    /// `metadata.name`.
    pub name: String,
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// A kind that the API server serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Group, version, kind and plural name.
    pub api: ApiResource,
    /// Whether its objects live in namespaces.
    pub namespaced: bool,
    /// Whether it has a status subresource.
    pub has_status: bool,
}

/// Groups of the API server itself that end in `.k8s.io`; others that do are served by CustomResourceDefinitions.
const BUILT_IN_GROUPS: [&str; 16] = [
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "apiregistration.k8s.io",
    "authentication.k8s.io",
    "authorization.k8s.io",
    "certificates.k8s.io",
    "coordination.k8s.io",
    "discovery.k8s.io",
    "events.k8s.io",
    "flowcontrol.apiserver.k8s.io",
    "networking.k8s.io",
    "node.k8s.io",
    "rbac.authorization.k8s.io",
    "resource.k8s.io",
    "scheduling.k8s.io",
    "storage.k8s.io",
];

impl Kind {
    /// The kind by name.
    pub fn name(&self) -> KindName {
        KindName { api_version: self.api.api_version.clone(), kind: self.api.kind.clone() }
    }

    /// Whether the host may write the status of such a parent: there is one, and it does not belong to a controller of Kubernetes.
    pub fn tells_status(&self) -> bool {
        self.has_status && !self.is_built_in()
    }

    /// Its objects in this namespace; none: in all of them, or those of a kind of cluster scope.
    pub fn objects<K: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>>(
        &self,
        client: &Client,
        namespace: Option<&str>,
    ) -> Api<K> {
        match namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &self.api),
            None => Api::all_with(client.clone(), &self.api),
        }
    }

    /// `Kind.group`: the kind whatever its version.
    pub fn group_kind(&self) -> String {
        format!("{}.{}", self.api.kind, self.api.group).trim_end_matches('.').to_owned()
    }

    /// `plural.group`: the resource as RBAC rules name it.
    pub fn resource(&self) -> String {
        format!("{}.{}", self.api.plural, self.api.group).trim_end_matches('.').to_owned()
    }

    /// Whether the API server itself defines this kind, not a CustomResourceDefinition: groups without a dot are its own.
    pub fn is_built_in(&self) -> bool {
        let group = self.api.group.as_str();
        !group.contains('.') || BUILT_IN_GROUPS.contains(&group)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.api.kind, self.api.api_version)
    }
}

/// The field manager that the API server invents, at an apply, for all that an object without `metadata.managedFields` has.
pub const BEFORE_FIRST_APPLY: &str = "before-first-apply";

/// What a field manager owns of an object, from `metadata.managedFields`.
#[derive(Clone, Debug)]
pub struct OwnedFields {
    /// The field manager's name.
    pub manager: String,
    /// `Apply` or `Update`.
    pub operation: String,
    /// Empty for the object itself, `status` for its status.
    pub subresource: String,
    /// The `fieldsV1` document.
    pub fields: Box<RawValue>,
}

/// A live object.
#[derive(Clone, Debug)]
pub struct Object {
    /// Name, namespace, UID, version, generation, finalizers and deletion timestamp. The rest is left out here, so that it is not
    /// held twice.
    meta: ObjectMeta,
    /// The UID of the owner that is marked as controller.
    controller: Option<Box<str>>,
    json: Arc<str>,
    /// Of our field managers, and of [`BEFORE_FIRST_APPLY`].
    owned: Vec<OwnedFields>,
    /// The parent's UID by label, and the annotation that goes with it; see [`identity::BINDING_ANNOTATION`].
    binding: Option<Box<(String, String)>>,
    /// If we have applied it, what the other managers own of the object itself.
    others: Vec<OwnedFields>,
    /// If not, their names, each once.
    other_managers: Vec<String>,
    /// See [`Self::kept_labels`].
    labels: OnceLock<BTreeMap<String, String>>,
}

impl Object {
    /// The object as JSON text, without `metadata.managedFields`.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// The memory that it takes beside its JSON, but for what the allocator itself needs.
    pub fn overhead(&self) -> usize {
        let Self { meta, controller, json: _, owned, binding, others, other_managers, labels } = self;
        let of_meta = [&meta.name, &meta.namespace, &meta.uid, &meta.resource_version];
        let of_meta = of_meta.into_iter().flatten().chain(meta.finalizers.iter().flatten()).map(String::capacity);
        let of_owned = owned.iter().chain(others).map(|entry| {
            let texts = entry.manager.capacity() + entry.operation.capacity() + entry.subresource.capacity();
            size_of::<OwnedFields>() + texts + entry.fields.get().len()
        });
        let of_binding = binding.iter().map(|pair| size_of_val(&**pair) + pair.0.capacity() + pair.1.capacity());
        let of_others = other_managers.iter().map(|manager| size_of::<String>() + manager.capacity());
        let of_labels = labels.get().into_iter().flat_map(|labels| labels.iter());
        let of_labels = of_labels.map(|(key, value)| 2 * size_of::<String>() + key.len() + value.len());
        let controller = controller.as_deref().map_or(0, str::len);
        let finalizers = meta.finalizers.as_ref().map_or(0, |finalizers| finalizers.capacity() * size_of::<String>());
        let texts: usize = of_meta.chain(of_owned).chain(of_binding).chain(of_others).chain(of_labels).sum();
        size_of::<Self>() + controller + finalizers + texts
    }

    /// Name and namespace.
    pub fn key(&self) -> ObjectKey {
        ObjectKey { namespace: self.meta.namespace.clone(), name: self.name().to_owned() }
    }

    /// `metadata.namespace`; none for an object of cluster scope.
    pub fn namespace(&self) -> Option<&str> {
        self.meta.namespace.as_deref()
    }

    /// `metadata.name`; the API server never leaves it out.
    pub fn name(&self) -> &str {
        self.meta.name.as_deref().unwrap_or_default()
    }

    /// `metadata.uid`; the API server never leaves it out.
    pub fn uid(&self) -> &str {
        self.meta.uid.as_deref().unwrap_or_default()
    }

    /// `metadata.resourceVersion`.
    pub fn resource_version(&self) -> &str {
        self.meta.resource_version.as_deref().unwrap_or_default()
    }

    /// `metadata.generation`; 0 for kinds that have none.
    pub fn generation(&self) -> i64 {
        self.meta.generation.unwrap_or_default()
    }

    /// Whether the object is being deleted.
    pub fn is_deleting(&self) -> bool {
        self.meta.deletion_timestamp.is_some()
    }

    /// `metadata.finalizers`.
    pub fn finalizers(&self) -> &[String] {
        self.meta.finalizers.as_deref().unwrap_or_default()
    }

    /// The UID of the owner that is marked as controller, if there is one.
    pub fn controller_uid(&self) -> Option<&str> {
        self.controller.as_deref()
    }

    /// The UID of the parent whose child this is: its controller, or if it cannot have one, what it is bound to. `kind` as
    /// `Kind.group` is the object's own.
    pub fn parent_uid(&self, kind: &str) -> Option<&str> {
        let bound = || {
            let (uid, binding) = self.binding.as_deref()?;
            (*binding == identity::binding(uid, kind, &self.key())).then_some(uid.as_str())
        };
        self.controller_uid().or_else(bound)
    }

    /// The annotation of that name, read from the JSON: few ask for one.
    pub fn annotation(&self, name: &str) -> Option<String> {
        #[derive(Deserialize)]
        struct Annotated {
            metadata: Annotations,
        }
        #[derive(Deserialize)]
        struct Annotations {
            annotations: Option<BTreeMap<String, String>>,
        }
        // Most objects have no such annotation, and need not be parsed to see that.
        if !self.json.contains(name) {
            return None;
        }
        serde_json::from_str::<Annotated>(&self.json).ok()?.metadata.annotations?.remove(name)
    }

    /// What `manager` owns of `subresource` by `operation`.
    pub fn owned_by(&self, manager: &str, operation: &str, subresource: &str) -> Option<&RawValue> {
        let entry = self
            .owned
            .iter()
            .find(|entry| entry.manager == manager && entry.operation == operation && entry.subresource == subresource);
        entry.map(|entry| entry.fields.as_ref())
    }

    /// What others own of an object that we have applied, subresources aside.
    pub fn others(&self) -> &[OwnedFields] {
        &self.others
    }

    /// `metadata.labels`, read from the JSON: few ask for them.
    pub fn labels(&self) -> BTreeMap<String, String> {
        #[derive(Deserialize)]
        struct Labelled {
            metadata: Labels,
        }
        #[derive(Deserialize)]
        struct Labels {
            labels: Option<BTreeMap<String, String>>,
        }
        let labelled = serde_json::from_str::<Labelled>(&self.json).ok();
        labelled.and_then(|labelled| labelled.metadata.labels).unwrap_or_default()
    }

    /// The same, kept with the object, for those who ask again and again.
    pub fn kept_labels(&self) -> &BTreeMap<String, String> {
        self.labels.get_or_init(|| self.labels())
    }

    /// Whether a field manager of this name owns something of the object itself, not of a subresource.
    pub fn has_manager(&self, name: &str) -> bool {
        let of_object = self.owned.iter().chain(&self.others).filter(|entry| entry.subresource.is_empty());
        self.other_managers.iter().chain(of_object.map(|entry| &entry.manager)).any(|manager| manager == name)
    }

    /// Whether a manager of ours other than `manager` has applied it: the object was another parent's or reconciler's before.
    pub fn has_older_apply_than(&self, manager: &str) -> bool {
        self.owned.iter().any(|entry| {
            entry.operation == "Apply"
                && entry.subresource.is_empty()
                && entry.manager != manager
                && entry.manager.starts_with(FIELD_MANAGER_PREFIX)
        })
    }

    /// Whether this is a later state than `other` of the same object. Resource versions are compared as the numbers
    /// that they are since Kubernetes 1.35 (KEP-5504); where they are not numbers, every arrival counts as later.
    pub fn is_newer_than(&self, other: &Self) -> bool {
        if self.uid() != other.uid() {
            return true;
        }
        compare_versions(self.resource_version(), other.resource_version()) == Ordering::Greater
    }

    /// The object with `apiVersion` and `kind`, which lists of built-in kinds leave out of their items.
    pub fn with_kind(mut self, api: &ApiResource) -> Self {
        #[derive(Deserialize)]
        struct Probe<'a> {
            #[serde(borrow)]
            kind: Option<&'a RawValue>,
        }
        // So most begin, and need not be parsed to see that.
        let begins = format!(r#"{{"apiVersion":"{}","kind":"{}","#, api.api_version, api.kind);
        let has_kind = self.json.starts_with(r#"{"kind":"#)
            || self.json.starts_with(&begins)
            || serde_json::from_str::<Probe<'_>>(&self.json).is_ok_and(|probe| probe.kind.is_some());
        if !has_kind && let Some(rest) = self.json.strip_prefix('{') {
            let comma = if rest.starts_with('}') { "" } else { "," };
            self.json = format!(r#"{{"apiVersion":"{}","kind":"{}"{comma}{rest}"#, api.api_version, api.kind).into();
        }
        self
    }
}

fn compare_versions(left: &str, right: &str) -> Ordering {
    match (left.parse::<u64>(), right.parse::<u64>()) {
        (Ok(left), Ok(right)) => left.cmp(&right),
        _ if left == right => Ordering::Equal,
        _ => Ordering::Greater,
    }
}

impl Resource for Object {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(api: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&api.kind)
    }

    fn group(api: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&api.group)
    }

    fn version(api: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&api.version)
    }

    fn api_version(api: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&api.api_version)
    }

    fn plural(api: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&api.plural)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}

/// The members of a JSON object in the order of the text, values untouched.
struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::with_capacity(map.size_hint().unwrap_or(8));
                while let Some(entry) = map.next_entry::<MemberName<'de>, &'de RawValue>()? {
                    members.push((entry.0.0, entry.1));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

#[derive(Deserialize)]
struct MemberName<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ManagedFieldsEntry<'a> {
    #[serde(default)]
    manager: Cow<'a, str>,
    #[serde(default)]
    operation: Cow<'a, str>,
    #[serde(default)]
    subresource: Cow<'a, str>,
    #[serde(borrow)]
    fields_v1: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Not a derive: a raw value can be borrowed only from text, which the streaming deserializers of kube are not.
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        Self::from_json(raw.get()).map_err(D::Error::custom)
    }
}

impl Object {
    /// Reads an object from the text of the API server.
    ///
    /// # Errors
    /// If it is not a JSON object with metadata as Kubernetes has it.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        let Members(members) = serde_json::from_str(text)?;
        let mut json = String::with_capacity(text.len());
        let (mut owned, mut others) = (Vec::new(), Vec::new());
        let mut meta = ObjectMeta::default();
        write_members(&mut json, &members, |json, name, value| {
            if name != "metadata" {
                json.push_str(value.get());
                return Ok(());
            }
            let Members(mut metadata) = serde_json::from_str(value.get())?;
            // Not only the first: nothing of it may be left for a plugin to see.
            while let Some(at) = metadata.iter().position(|(name, _)| name == "managedFields") {
                (owned, others) = entries(metadata.remove(at).1)?;
            }
            let begin = json.len();
            write_members(json, &metadata, |json, _, value| {
                json.push_str(value.get());
                Ok(())
            })?;
            // Without the managed fields, of which a tree would be made, and which are half of an object.
            meta = serde_json::from_str(json.get(begin..).unwrap_or_default())?;
            Ok(())
        })?;
        let binding = binding(&mut meta);
        let owners = meta.owner_references.take().unwrap_or_default();
        let controller = owners.into_iter().find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.into());
        // Held once, in the JSON; who needs them parses them there.
        (meta.managed_fields, meta.annotations, meta.labels) = (None, None, None);
        (meta.generate_name, meta.self_link) = (None, None);
        let applied = |entry: &OwnedFields| {
            entry.manager.starts_with(FIELD_MANAGER_PREFIX)
                && entry.operation == "Apply"
                && entry.subresource.is_empty()
        };
        let mut other_managers = Vec::new();
        if !owned.iter().any(applied) {
            other_managers = others.drain(..).map(|entry| entry.manager).collect();
            other_managers.sort();
            other_managers.dedup();
        }
        Ok(Self {
            meta,
            controller,
            json: json.into(),
            owned,
            binding,
            others,
            other_managers,
            labels: OnceLock::new(),
        })
    }
}

fn binding(meta: &mut ObjectMeta) -> Option<Box<(String, String)>> {
    let uid = meta.labels.as_mut()?.remove(identity::PARENT_LABEL)?;
    let binding = meta.annotations.as_mut()?.remove(identity::BINDING_ANNOTATION)?;
    Some(Box::new((uid, binding)))
}

fn write_members(
    json: &mut String,
    members: &[(Cow<'_, str>, &RawValue)],
    mut write_value: impl FnMut(&mut String, &str, &RawValue) -> Result<(), serde_json::Error>,
) -> Result<(), serde_json::Error> {
    json.push('{');
    for (at, (name, value)) in members.iter().enumerate() {
        if at > 0 {
            json.push(',');
        }
        json.push_str(&serde_json::to_string(name)?);
        json.push(':');
        write_value(json, name, value)?;
    }
    json.push('}');
    Ok(())
}

/// Our own entries, and those of others of the object itself.
fn entries(managed_fields: &RawValue) -> Result<(Vec<OwnedFields>, Vec<OwnedFields>), serde_json::Error> {
    let entries: Option<Vec<ManagedFieldsEntry<'_>>> = serde_json::from_str(managed_fields.get())?;
    let (mut owned, mut others) = (Vec::new(), Vec::new());
    for entry in entries.unwrap_or_default() {
        let manager = entry.manager.into_owned();
        let kept = manager.starts_with(FIELD_MANAGER_PREFIX) || manager == BEFORE_FIRST_APPLY;
        let (operation, subresource) = (entry.operation.into_owned(), entry.subresource.into_owned());
        match entry.fields_v1.map(ToOwned::to_owned) {
            Some(fields) if kept => owned.push(OwnedFields { manager, operation, subresource, fields }),
            fields if subresource.is_empty() => {
                let fields = fields.unwrap_or_else(|| RawValue::NULL.to_owned());
                others.push(OwnedFields { manager, operation, subresource, fields });
            }
            _ => {}
        }
    }
    Ok((owned, others))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"metadata":{"name":"a","namespace":"n","uid":"u1","resourceVersion":"10","labels":{"x":"é\"y"},
        "ownerReferences":[{"apiVersion":"v1","kind":"K","name":"p","uid":"p1","controller":true}],
        "managedFields":[{"manager":"kubectl","operation":"Update","fieldsV1":{"f:data":{}}},
            {"manager":"pilothouse/1","operation":"Apply","apiVersion":"v1","fieldsType":"FieldsV1","fieldsV1":{"f:data":{"f:k":{}}}}]},
        "data":{"k":"v"}}"#;

    fn object(text: &str) -> Object {
        Object::from_json(text).unwrap()
    }

    #[test]
    fn managed_fields_are_left_out_and_ours_kept() {
        let object = object(TEXT);
        let json: serde_json::Value = serde_json::from_str(object.json()).unwrap();
        assert_eq!(json["metadata"].get("managedFields"), None);
        assert_eq!(json["metadata"]["labels"]["x"], "é\"y");
        assert_eq!(json["data"]["k"], "v");
        let owned = object.owned_by("pilothouse/1", "Apply", "").unwrap();
        assert_eq!(owned.get(), r#"{"f:data":{"f:k":{}}}"#);
        assert!(object.owned_by("kubectl", "Update", "").is_none());
        assert!(object.has_manager("kubectl") && object.has_manager("pilothouse/1"));
        assert!(!object.has_manager("pilothouse/2"));
        assert!(!object.has_older_apply_than("pilothouse/1"));
        assert!(object.has_older_apply_than("pilothouse/2"));
        assert_eq!(object.controller_uid(), Some("p1"));
    }

    #[test]
    fn managed_fields_that_come_twice_are_left_out_twice() {
        let twice = object(r#"{"metadata":{"name":"a","managedFields":[],"managedFields":[{"manager":"kubectl"}]}}"#);
        assert_eq!(twice.json(), r#"{"metadata":{"name":"a"}}"#);
        assert!(twice.has_manager("kubectl"));
    }

    #[test]
    fn an_item_of_a_list_gets_its_kind() {
        let api = ApiResource::erase::<k8s_openapi::api::core::v1::ConfigMap>(&());
        let object = object(TEXT).with_kind(&api);
        let json: serde_json::Value = serde_json::from_str(object.json()).unwrap();
        assert_eq!((&json["kind"], &json["apiVersion"]), (&"ConfigMap".into(), &"v1".into()));
        let again = object.clone().with_kind(&api);
        assert_eq!(again.json(), object.json());
    }

    #[test]
    fn versions_compare_as_numbers_within_one_uid() {
        let at = |uid: &str, version: &str| {
            object(&format!(r#"{{"metadata":{{"name":"a","uid":"{uid}","resourceVersion":"{version}"}}}}"#))
        };
        assert!(at("u", "10").is_newer_than(&at("u", "9")));
        assert!(!at("u", "9").is_newer_than(&at("u", "10")));
        assert!(!at("u", "10").is_newer_than(&at("u", "10")));
        assert!(at("v", "9").is_newer_than(&at("u", "10")));
    }

    #[test]
    fn lists_of_kube_can_hold_it() {
        let list = format!(
            r#"{{"kind":"ConfigMapList","apiVersion":"v1","metadata":{{"resourceVersion":"5"}},"items":[{TEXT}]}}"#
        );
        let list: kube::core::ObjectList<Object> = serde_json::from_str(&list).unwrap();
        assert_eq!(list.items[0].name(), "a");
        let event = format!(r#"{{"type":"ADDED","object":{TEXT}}}"#);
        let event: kube::core::WatchEvent<Object> = serde_json::from_str(&event).unwrap();
        assert!(matches!(event, kube::core::WatchEvent::Added(object) if object.name() == "a"));
    }
}
