// The published schema in readable form. Swagger UI comes from this server, like everything that it loads.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  presets: [SwaggerUIBundle.presets.apis],
  validatorUrl: null,
});
