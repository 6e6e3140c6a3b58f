// MyApp as an operator in Go, on controller-runtime: the loop that tutorials show, made correct. What it has to do is said by
// plugins/myapp; parents of the benchmark have neither config nor anything outside of the cluster.
//
// Its limits are not the defaults: 32 reconciles at a time instead of one, and no limit of requests a second.
package main

import (
	"context"
	"fmt"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

const finalizer = "mygroup.example.com/finalizer"

type reconciler struct {
	client.Client
	scheme *runtime.Scheme
}

func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	app := &MyApp{}
	if err := r.Get(ctx, req.NamespacedName, app); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !app.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.finalize(ctx, app)
	}
	if !controllerutil.ContainsFinalizer(app, finalizer) {
		before := app.DeepCopy()
		controllerutil.AddFinalizer(app, finalizer)
		// With its version: a list of finalizers is replaced as a whole. What is read from now on is the answer.
		patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
		if err := r.Patch(ctx, app, patch); err != nil {
			return ctrl.Result{}, err
		}
	}

	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: app.Name, Namespace: app.Namespace}}
	_, err := controllerutil.CreateOrUpdate(ctx, r.Client, deployment, func() error {
		want(app, deployment)
		return controllerutil.SetControllerReference(app, deployment, r.scheme)
	})
	if err != nil {
		return ctrl.Result{}, err
	}

	before := app.DeepCopy()
	app.Status.ObservedGeneration = app.Generation
	app.Status.AvailableReplicas = &deployment.Status.AvailableReplicas
	meta.SetStatusCondition(&app.Status.Conditions, available(app, deployment))
	if equality.Semantic.DeepEqual(before.Status, app.Status) {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, r.Status().Patch(ctx, app, client.MergeFrom(before))
}

func (r *reconciler) finalize(ctx context.Context, app *MyApp) error {
	if !controllerutil.ContainsFinalizer(app, finalizer) {
		return nil
	}
	log.FromContext(ctx).V(1).Info("nothing is left outside the cluster")
	before := app.DeepCopy()
	controllerutil.RemoveFinalizer(app, finalizer)
	return client.IgnoreNotFound(r.Patch(ctx, app, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})))
}

// want sets what is ours, and leaves what the API server has put beside it: so nothing is written that is there already.
func want(app *MyApp, deployment *appsv1.Deployment) {
	labels := map[string]string{"app.kubernetes.io/name": "myapp", "app.kubernetes.io/instance": app.Name}
	template := &deployment.Spec.Template
	for _, object := range []*map[string]string{&deployment.Labels, &template.Labels} {
		if *object == nil {
			*object = map[string]string{}
		}
		for key, value := range labels {
			(*object)[key] = value
		}
	}
	if deployment.Spec.Selector == nil {
		deployment.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	}
	if app.Spec.Replicas != nil {
		deployment.Spec.Replicas = app.Spec.Replicas
	}
	if len(template.Spec.Containers) == 0 {
		template.Spec.Containers = []corev1.Container{{}}
	}
	template.Spec.Containers[0].Name = "myapp"
	template.Spec.Containers[0].Image = app.Spec.Image
}

func available(app *MyApp, deployment *appsv1.Deployment) metav1.Condition {
	have, wanted := deployment.Status.AvailableReplicas, int32(1)
	if deployment.Spec.Replicas != nil {
		wanted = *deployment.Spec.Replicas
	}
	condition := metav1.Condition{
		Type:               "Available",
		Status:             metav1.ConditionFalse,
		Reason:             "ReplicasUnavailable",
		Message:            fmt.Sprintf("%d of %d replicas are %s", have, wanted, word()),
		ObservedGeneration: app.Generation,
	}
	if have >= wanted {
		condition.Status, condition.Reason = metav1.ConditionTrue, "ReplicasAvailable"
	}
	return condition
}

// word of a logic that is changed is another one.
func word() string {
	if word, ok := os.LookupEnv("MYAPP_WORD"); ok {
		return word
	}
	return "available"
}

func run() error {
	ctrl.SetLogger(zap.New())
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return err
	}
	addToScheme(scheme)
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	config.QPS = -1
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:                 scheme,
		Metrics:                metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress: "0",
	})
	if err != nil {
		return err
	}
	err = ctrl.NewControllerManagedBy(manager).
		For(&MyApp{}).
		Owns(&appsv1.Deployment{}).
		WithOptions(controller.Options{MaxConcurrentReconciles: 32}).
		Complete(&reconciler{Client: manager.GetClient(), scheme: scheme})
	if err != nil {
		return err
	}
	return manager.Start(ctrl.SetupSignalHandler())
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
